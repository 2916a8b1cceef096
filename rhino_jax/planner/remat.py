"""What to make again in the backward pass, given the shardings of a brief plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rhino_jax.ir.transform import RECOMPUTE, Transform
from rhino_jax.planner.search.found import SearchResult
from rhino_jax.planner.search.remat.choice import recompute_choices
from rhino_jax.planner.variant_search import Search


@dataclass(frozen=True, slots=True)
class MicrobatchedProgram:
    """A program in micro-batches.

    Attributes:
      count: how many.
      least_bytes: the least that any plan of it was found to hold.
    """

    count: int
    least_bytes: int


ROOMS = (4.0, 1.25)
"""Memory of the plans whose shardings are taken, as times the least that any plan of
the program holds with all of it kept: little communication needs more of it. The second
is for where nothing can be made of the first, and takes up to ten times as long."""

SHARES = (0.97, 0.85)
"""Of the budget that is asked for, one after the other until a plan fits: a plan of the
changed program holds a little more than the choice says, since it has other kernels."""

SECONDS = 2.0
"""For one choice of what is made again."""


def with_room(search: Search, found: SearchResult) -> Iterator[SearchResult]:
    """Brief plans of a program with the memory that it needs.

    Args:
      search, found: of the program with all of it kept, which need not fit.
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


@dataclass(frozen=True, slots=True)
class RematSite:
    """Something that could be made again.

    Attributes:
      name: for people.
      transform: that does it.
      step_s, peak_bytes: as estimated, before it is planned.
    """

    name: str
    transform: Transform
    step_s: float
    peak_bytes: int


def made_again(
    wide: SearchResult, budget_bytes: float, cut: MicrobatchedProgram | None
) -> list[RematSite]:
    """What may be made again so that a program fits under the shardings of a plan, the
    cheapest first; nothing where all fits, or none would do.

    Args:
      wide: a plan that need not fit.
      budget_bytes: of one device.
      cut: in how many micro-batches the program will run, which hold too much as well.
    """
    solved = wide.solved[0]
    if cut is not None:
        # A byte less in a micro-batch is one less in each of the whole's.
        less = cut.count * (cut.least_bytes - budget_bytes)
        budget_bytes = solved.solution.peak - less
    found = recompute_choices(solved, budget_bytes, seconds=SECONDS)
    if found and not str(found[0].choice):
        return []
    return [
        RematSite(
            c.name,
            Transform(RECOMPUTE, 0, 0, str(c.choice)),
            wide.step_s + c.answer.added_s,
            c.answer.peak_bytes,
        )
        for c in found
        if str(c.choice)
    ]
