"""Rematerialization under the shardings of a brief plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rhino_jax.ir.transform import RECOMPUTE, Transform
from rhino_jax.planner.search.found import SearchResult
from rhino_jax.planner.search.remat.choice import Chosen, RematQuestion, ask
from rhino_jax.planner.variant_search import VariantCandidate


ROOMS = (4.0, 1.25)
"""Memory budgets of the plans whose shardings are taken, in multiples of the smallest
peak of any plan of the program with all residuals saved: little communication needs
more memory. The second is for programs where no choice fits under the first, and takes
up to ten times as long."""

SHARES = (0.97, 0.85)
"""Shares of the requested budget within which a step's values are chosen, the second
where the plan with the first choice does not fit: a plan of the rematerialized program
has a slightly higher peak than the choice predicts, since its kernels differ. Planning
a step takes longer than planning a stage, so there are no more choices."""

MAX_CHOICES = 5
"""Maximum number of choices of a stage, one after the other, each to free the bytes
that a plan with the one before still lacks."""

MIN_MORE = 0.01
"""Share of the budget by which at least a choice of a stage must free more: with less,
the next choice is the same again."""

EFFORT = 1.0
"""Limit on CP-SAT's deterministic seconds for one choice of what to recompute: about
two seconds on one core."""


def with_room(saved: VariantCandidate) -> Iterator[SearchResult]:
    """Yield brief plans of a program with as much memory as it needs.

    Args:
      saved: the program with all residuals saved, which need not fit.
    """
    found = saved.found
    if not found.is_bound_by_memory:
        yield found
        return
    least = found.best.solution.smallest_peak
    for room in ROOMS:
        brief = saved.search.brief.asking(memory_budget_bytes=room * least)
        wide = brief.again(found)
        if wide.fits:
            yield wide


def as_pass(chosen: Chosen) -> Transform:
    """Return the pass that applies a choice of what to recompute."""
    return Transform(RECOMPUTE, 0, 0, str(chosen.choice))


@dataclass(slots=True)
class RematTries:
    """Choices of what to recompute, each to be planned: the shardings, and so the peak,
    of the plan are not those under which the choice fits. While plans do not fit, the
    next choice has less memory.

    Attributes:
      asked: the residuals of a step, or of a stage, under some shardings.
      budget_bytes: the memory budget of the next choice.
      least_bytes: bytes by which the next choice must free more at least.
      count: maximum number of choices.
      lacks_bytes: bytes by which the plan with the last choice exceeds its budget.
    """

    asked: RematQuestion
    budget_bytes: float
    least_bytes: float
    count: int = MAX_CHOICES
    lacks_bytes: float = 0.0

    def __iter__(self) -> Iterator[list[Chosen]]:
        """Yield choices, the cheapest first; see `ask`."""
        for _ in range(self.count):
            found = ask(self.asked, self.budget_bytes, effort=EFFORT)
            if not found:
                return
            yield found
            self.budget_bytes -= max(self.lacks_bytes, self.least_bytes)
