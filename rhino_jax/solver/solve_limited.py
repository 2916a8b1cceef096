"""Solving a core under its memory limit: the order of the search.

1. Memory gets a multiplier per interval of a node (`price_intervals`): the first
   assignments that fit.
2. If the core is not too large, memory gets the best multipliers per time
   (`price_times`): a bound, and the options that are worth searching.
3. CP-SAT searches these options, more of them each time (`search_kernels`).
4. CP-SAT improves one neighbourhood after the other (`search_neighbourhoods`).
5. CP-SAT solves a core that is small enough whole, and proves optimality.
"""

from __future__ import annotations

import time

from rhino_jax.solver.bounds.time_prices import price_intervals, price_times
from rhino_jax.solver.limited import Limited, Report
from rhino_jax.solver.moves.neighbourhoods import search_kernels, search_neighbourhoods
from rhino_jax.solver.reduction import Core


INTERVALS_SHARE = {True: 0.08, False: 0.75}
"""Share of the time for multipliers per interval, by whether multipliers per time
follow."""

TIMES_SHARE, KERNELS_SHARE = 0.25, 0.4
"""Shares of the remaining time for multipliers per time, and then for kernels."""

NEIGHBOURHOODS_SHARE = {True: 0.25, False: 1.0}
"""Share of the remaining time for neighbourhoods, by whether CP-SAT then solves the
whole core."""


def solve_limited(
    core: Core, *, deadline: float, workers: int, seed: int, report: Report
) -> Limited:
    """Search until optimality is proved, or the deadline.

    Args:
      core, deadline, workers, seed, report: as in `Limited`.
    Raises:
      UnsatisfiedError: infeasibility is proved.
    """
    search = Limited(core, deadline, workers, seed, report)

    def until(share: float) -> float:
        now = time.monotonic()
        return now + share * (deadline - now)

    price_intervals(search, until(INTERVALS_SHARE[search.is_priced]))
    priced = None
    if search.is_open and search.is_priced:
        priced = price_times(search, until(TIMES_SHARE))
    if search.is_open and priced is not None:
        search_kernels(search, priced, until(KERNELS_SHARE))
    if search.is_open and search.best is not None:
        limits = search.limits(until(NEIGHBOURHOODS_SHARE[search.is_whole]))
        search_neighbourhoods(search.moves, search.best, search.offer, limits)
    if search.is_open and search.is_whole:
        search.settle_whole()
    return search
