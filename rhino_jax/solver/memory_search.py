"""The search when the memory limit binds.

Memory at times that overflow is moved to the objective (a Lagrangian relaxation, whose
optimum less the limit's term is a lower bound), together with hidable time: see
`prices`. Assignments that are cheapest at the best multipliers, whether they fit or
not, are combined to one that fits: see `fusion`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rhino_jax.solver.bounds.prices import Mixture, TimePrices
from rhino_jax.solver.incumbents import Effort, Incumbents
from rhino_jax.solver.overlap import Overlap
from rhino_jax.solver.pairwise import PairwiseSolution, solve_pairwise
from rhino_jax.solver.problem import Labels


ROUNDS_PER_PRICE = 5
"""Rounds of messages per multiplier, starting from the previous messages."""

STEP = 0.5
"""Share of the way to the master problem's multipliers: with full steps they oscillate,
since a few assignments determine little.

Source: Ben-Ameur, Neto, "Acceleration of cutting-plane and column generation
algorithms", Networks 49 (2007)."""

CLOSE = 1e-3
"""Relative gap of the dual at which the search stops."""

NEWS = 0.1
"""Smallest improvement that counts as progress, as a share of the gap."""

STALE_PRICES = 2
"""Consecutive multipliers without progress after which the search stops."""

MAX_LONG, LONG_ROUNDS = 1, 40
"""Number of multipliers with more rounds, if short ones give no progress, and their
rounds: most of the remaining gain for a wide ResNet, in a second."""


@dataclass(frozen=True, slots=True, eq=False)
class DualSolution:
    """The result of the search for multipliers.

    Attributes:
      prices: the best multipliers.
      choices: assignments, whether they fit or not, the most promising first: those in
        the best convex combination, then the cheapest at the multipliers.
      bound: lower bound on the cost of any assignment that fits.
    """

    prices: TimePrices
    choices: tuple[Labels, ...]
    bound: float


def search_memory(
    overlap: Overlap,
    incumbents: Incumbents,
    free: PairwiseSolution,
    weight: float,
    effort: Effort,
) -> DualSolution | None:
    """Search for the best multipliers of memory.

    None if no convex combination of the known assignments fits.

    Args:
      overlap: the problem, with hidable collectives.
      incumbents: known assignments; receives new ones.
      free: solution of the problem without memory.
      weight: weight of hidable time of that solution.
      effort: limits on the search's work.
    """
    problem = overlap.problem
    mixture = Mixture(problem.limit)

    def add(labels: Labels) -> None:
        mixture.add(overlap.ends_s(labels), problem.profile(labels) / problem.limit)

    for member in incumbents.members:
        add(member)
    brief = replace(
        effort,
        deterministic_s=0.0,
        max_rounds=ROUNDS_PER_PRICE,
        max_fusions=1,
    )
    longer = replace(brief, max_rounds=min(effort.max_rounds, LONG_ROUNDS))
    centre, bound, found = TimePrices(weight), free.bound, free
    before, stale, left = math.inf, 0, effort.max_prices
    long = MAX_LONG if effort.proves else 0
    while True:
        best = mixture.solve()
        if best is None:
            return None
        upper, target, shares = best
        is_close = upper - bound <= CLOSE * upper or bound > effort.cutoff_s
        if is_close or time.monotonic() > effort.deadline:
            break
        is_long = left == 0 or stale == STALE_PRICES
        if stale > STALE_PRICES or (is_long and long == 0):
            break
        least = NEWS * (upper - bound)
        # If the last query found nothing new, take a full step.
        has_news = before - upper > least
        query, before = centre.towards(target, STEP if has_news else 1.0), upper
        found = _at(
            overlap, query, incumbents.members[-2:], longer if is_long else brief, found
        )
        long, left = (long - 1, left) if is_long else (long, left - 1)
        proved = found.bound - query.paid(problem.limit)
        stale = 0 if has_news or proved - bound > least else stale + 1
        if proved > bound:
            centre, bound = query, proved
        add(found.labels)
        incumbents.offer(found.labels)
    # Assignments with the largest shares first, then the cheapest.
    priced = overlap.weighted(target.weight).priced(target.memory)
    values = [priced.objective(member) for member in incumbents.members[: len(shares)]]
    order = np.lexsort((np.array(values), -shares.round(6)))
    near = {incumbents.members[k].tobytes(): incumbents.members[k] for k in order}
    return DualSolution(target, tuple(near.values()), bound)


def _at(
    overlap: Overlap,
    prices: TimePrices,
    starts: Sequence[Labels],
    effort: Effort,
    before: PairwiseSolution,
) -> PairwiseSolution:
    problem = overlap.weighted(prices.weight).priced(prices.memory)
    # Priced costs are above real ones by the term of the limit.
    paid_s = prices.paid(overlap.problem.limit)
    effort = replace(effort, cutoff_s=effort.cutoff_s + paid_s)
    return solve_pairwise(problem, starts, effort, before)
