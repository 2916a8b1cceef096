"""Rematerialization under the shardings of a brief plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rhino_jax.ir.transform import RECOMPUTE, Transform
from rhino_jax.planner.search.found import SearchResult
from rhino_jax.planner.search.remat.candidates import candidates_of
from rhino_jax.planner.search.remat.choice import ask
from rhino_jax.planner.search.remat.rows import Chosen
from rhino_jax.planner.variant_search import Search


@dataclass(frozen=True, slots=True)
class MicrobatchedProgram:
    """A program that will run in micro-batches.

    Attributes:
      count: the number of micro-batches.
      least_bytes: the smallest peak, in bytes per device, found for any plan of it.
    """

    count: int
    least_bytes: int


ROOMS = (4.0, 1.25)
"""Memory budgets of the plans whose shardings are taken, in multiples of the smallest
peak of any plan of the program with all residuals saved: little communication needs
more memory. The second is for programs where no choice fits under the first, and takes
up to ten times as long."""

SHARES = (0.97, 0.85)
"""Shares of the requested budget, tried one after the other until a plan fits: a plan
of the rematerialized program has a slightly higher peak than the choice predicts, since
its kernels differ."""

SECONDS = 2.0
"""Time limit in seconds for one choice of what to recompute."""


def with_room(search: Search, found: SearchResult) -> Iterator[SearchResult]:
    """Yield brief plans of a program with as much memory as it needs.

    Args:
      search, found: the search, and its result, of the program with all residuals
        saved, which need not fit.
    """
    if found.fits and not found.is_bound_by_memory:
        yield found
        return
    least = found.solved[0].solution.smallest_peak
    for room in ROOMS:
        wide = search.asking(
            level="fast", has_recipes=False, memory_budget_bytes=room * least
        ).again(found)
        if wide.fits:
            yield wide


def as_pass(chosen: Chosen) -> Transform:
    """Return the pass that applies a choice of what to recompute."""
    return Transform(RECOMPUTE, 0, 0, str(chosen.choice))


@dataclass(frozen=True, slots=True)
class RematSite:
    """A candidate for rematerialization.

    Attributes:
      name: for messages.
      transform: the pass that applies it.
      step_s, peak_bytes: step time in seconds and peak per device in bytes, as
        estimated before it is planned.
    """

    name: str
    transform: Transform
    step_s: float
    peak_bytes: int


def remat_sites(
    wide: SearchResult, budget_bytes: float, cut: MicrobatchedProgram | None
) -> list[RematSite]:
    """Return choices of what to recompute so that a program fits under the shardings of
    a plan, cheapest first; empty where everything fits as it is, or no choice fits.

    Args:
      wide: a plan that need not fit.
      budget_bytes: the memory budget of one device.
      cut: the micro-batches that the program will run in, which exceed the budget as
        well; None: the whole batch at once.
    """
    solved = wide.solved[0]
    if cut is not None:
        # One byte less in a micro-batch is `count` bytes less in the whole batch.
        less = cut.count * (cut.least_bytes - budget_bytes)
        budget_bytes = solved.solution.peak - less
    return [
        RematSite(
            c.name,
            as_pass(c),
            float(wide.step_s + c.answer.added_s),
            c.answer.peak_bytes,
        )
        for c in ask(candidates_of(solved), budget_bytes, seconds=SECONDS)
    ]
