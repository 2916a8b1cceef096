"""What is run of a plan: of flat arrays, wherever and in however many pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import jax
from jax.sharding import NamedSharding

from rhino_jax.frontend.trace import Traced
from rhino_jax.plan.plan import PlanData
from rhino_jax.runtime.spmd import SpmdExecutable
from rhino_jax.runtime.tasks.executable import TaskExecutable


class Executable(Protocol):
    """Runs a program as its plan says.

    Arrays are flat: the arguments', then captured constants; results likewise, then
    what is written back.

    Attributes:
      in_shardings: where each array is taken.
      out_shardings: where each result is given.
      is_runnable: whether its devices are here.
    """

    in_shardings: Sequence[NamedSharding]
    out_shardings: Sequence[NamedSharding]

    @property
    def is_runnable(self) -> bool: ...

    def run(self, arrays: Sequence[Any], compiled: Any = None) -> Sequence[Any]:
        """Run on arrays that are where they are taken; what is donated is consumed.

        Args:
          arrays: concrete ones.
          compiled: what `lower` was compiled to; None: compile where needed.
        """
        ...

    def for_types(self, shapes: Sequence[jax.ShapeDtypeStruct]) -> Executable:
        """Return a copy, with what was compiled, for other weak types.

        Args:
          shapes: types of the arrays that it was compiled for.
        """
        ...

    def run_staged(self, arrays: Sequence[Any]) -> Sequence[Any]:
        """Run inside of an outer trace: only constraints are placed."""
        ...

    def trace(self, shapes: Sequence[jax.ShapeDtypeStruct]) -> jax.stages.Traced:
        """Trace what `run` compiles."""
        ...

    def lower(self, shapes: Sequence[jax.ShapeDtypeStruct]) -> jax.stages.Lowered:
        """Lower what `run` compiles, also where there are no devices."""
        ...


def executable_of(traced: Traced, plan: PlanData, mesh: Any) -> Executable:
    """What runs a plan of a traced function on a mesh."""
    if plan.has_tasks:
        return TaskExecutable(traced, plan, mesh)
    return SpmdExecutable(traced, plan, mesh)
