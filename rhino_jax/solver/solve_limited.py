"""Solving a core under its memory limit: the order of the search.

1. Memory gets prices, one per interval of a node (`interval_prices`): the first choices
   that fit.
2. Where the core is not too large, it gets prices per time, the best that there are
   (`time_prices`): a bound, and which options are worth a thought.
3. CP-SAT takes these options, more of them each time (`kernels`).
4. CP-SAT improves one neighbourhood after the other (`neighbourhoods`).
5. CP-SAT takes a core that is small enough whole, and proves its best choice best.
"""

from __future__ import annotations

import time

from rhino_jax.solver.bounds.time_prices import price_times
from rhino_jax.solver.limited import Limited, Report
from rhino_jax.solver.moves.interval_prices import price_intervals
from rhino_jax.solver.moves.kernels import search_kernels
from rhino_jax.solver.moves.neighbourhoods import search_neighbourhoods
from rhino_jax.solver.presolve.reduction import Core


INTERVALS_SHARE = {True: 0.08, False: 0.75}
"""Share of the time that prices per interval have, where prices per time follow or
not."""

TIMES_SHARE, KERNELS_SHARE = 0.25, 0.4
"""Share of what is then left that prices per time have; and of what is left after them
that kernels have."""

NEIGHBOURHOODS_SHARE = {True: 0.25, False: 1.0}
"""Share of what is then left that neighbourhoods have, where CP-SAT takes the core
whole at last or not."""


def solve_limited(
    core: Core, *, deadline: float, workers: int, seed: int, report: Report
) -> Limited:
    """Search until the best is proved, or the time is over.

    Args: as of `Limited`.
    Raises:
      UnsatisfiedError: nothing fits, which was proved.
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
