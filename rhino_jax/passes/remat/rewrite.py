"""The remat pass: rewrite a program so that its backward pass recomputes values."""

from __future__ import annotations

from typing import Any

from rhino_jax.ir.program import Program
from rhino_jax.ir.transform import RECOMPUTE, Transform
from rhino_jax.passes.program_pass import ProgramPass, Trial, TrialKind
from rhino_jax.passes.remat.choice import RematChoice
from rhino_jax.passes.remat.decided import decide
from rhino_jax.passes.remat.emit import emit
from rhino_jax.passes.remat.frame import RematPlan
from rhino_jax.rewrite.flatten import flatten
from rhino_jax.rewrite.retraced import retraced


def recomputed(closed_jaxpr: Any, program: Program, choice: str) -> Any:
    """Retrace a function with the chosen values recomputed or offloaded.

    Args:
      closed_jaxpr: the function.
      program: imported from it.
      choice: a `RematChoice` as text.
    """
    flat = flatten(program, closed_jaxpr)
    decided = decide(flat, RematChoice.parse(choice))
    plan = RematPlan(flat, decided)
    return retraced(closed_jaxpr, lambda *arrays: emit(plan, arrays))


def _extent(remat: Transform) -> str:
    """Return how many values a choice of remat recomputes or offloads."""
    counts = ((key, len(remat.chosen.get(key, ()))) for key in ("recompute", "offload"))
    words = {"recompute": "recomputed", "offload": "offloaded"}
    found = ", ".join(f"{n} {words[key]}" for key, n in counts if n)
    return f" ({found})" if found else ""


PASS = ProgramPass(
    RECOMPUTE, recomputed, trial=Trial(TrialKind.SELECTED, _extent, "recompute")
)
