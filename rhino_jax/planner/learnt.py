"""Corrections of costs that compiled programs gave, kept in the plan cache.

They are kept with the plan that `refine="auto"` made last, under the program, the
target and the versions of all that makes and compiles plans (`plan.files.cache`).
"""

from __future__ import annotations

from rhino_jax.cost.corrections import NO_CORRECTIONS, CostCorrections
from rhino_jax.frontend.trace import Traced
from rhino_jax.passes.apply import apply_passes
from rhino_jax.plan.files.cache import cache_key, cached_plan, store_plan
from rhino_jax.plan.fingerprint import fingerprint
from rhino_jax.plan.lines import with_lines
from rhino_jax.plan.plan import PlanData


_ASKED = ("corrections",)


def learnt_of(of_program: str, traced: Traced) -> CostCorrections:
    """Return the corrections that are kept of a function, with its source lines as they
    are now.

    Args:
      of_program: `program_key` of the function and its target.
      traced: the traced function.
    """
    plan = cached_plan(cache_key(of_program, _ASKED))
    if plan is None or plan.fingerprint != fingerprint(traced.program, plan.mesh_axes):
        return NO_CORRECTIONS
    program = apply_passes(traced, plan.transforms).program
    return with_lines(plan, program).corrections


def keep_learnt(of_program: str, plan: PlanData) -> None:
    """Keep the corrections of a plan."""
    store_plan(cache_key(of_program, _ASKED), plan)
