"""Plans of the models of the zoo, as the tests of the search ask for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import rhino_jax as rhino
from rhino_jax.hardware.files import load_target
from rhino_jax.hardware.target import Target
from rhino_jax.models import registry
from rhino_jax.models.workload import Workload
from rhino_jax.plan.plan import PlanData


WITHOUT_TILES = load_target("v5e:4x4").replace(tile=())
"""For gaps: in tiles, models this small would be padding for the most part."""


def planned(
    workload: Workload | str,
    mesh: Mapping[str, int] | None,
    hardware: Target | str,
    **options: Any,
) -> PlanData:
    """The plan of a workload, or of the model of that name, on shapes alone, as it is
    written unless something else is asked for: what is tested is one search.

    Args:
      workload: what to plan.
      mesh: axis → size; None leaves it to the search.
      hardware: the target.
      options: of `rhino.plan`.
    """
    work = registry.get(workload) if isinstance(workload, str) else workload
    options = {"microbatches": 1, "recompute": "as written", **options}
    return rhino.plan(
        work.step,
        *work.abstract_args(),
        mesh=mesh,
        hardware=hardware,
        donate_argnums=work.donate_argnums,
        **{"progress": False} | options,
    )
