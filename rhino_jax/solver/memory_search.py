"""The search where the memory limit binds.

Memory gets prices at the times that overflow (a Lagrangian relaxation, whose optimum
less the priced limit is a lower bound), together with what can hide: see `prices`. The
choices that are cheapest at the best prices, whether they fit or not, are what a good
choice that fits is merged of: see `fusion`.
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
"""Rounds of messages at every price: those of the price before go on."""

STEP = 0.5
"""How far towards the prices that look best: all the way they swing, since a few
choices say little.

Source: Ben-Ameur, Neto, "Acceleration of cutting-plane and column generation
algorithms", Networks 49 (2007)."""

CLOSE = 1e-3
"""Share of the dual's value that may stay open: its prices decide what is merged."""

NEWS = 0.1
"""Share of what is open, by which less is no news."""

STALE_PRICES = 2
"""Prices in a row without news, after which there are no better ones."""

MAX_LONG, LONG_ROUNDS = 1, 40
"""Prices with more rounds, where brief ones give no news: most of what messages still
have to say about a wide ResNet, in a second."""


@dataclass(frozen=True, slots=True, eq=False)
class DualSolution:
    """What the best prices say.

    Attributes:
      prices: the best.
      choices: whether they fit or not, the most promising first: those whose
        mixture is the best on average, then the cheapest at the prices.
      bound: no choice that fits costs less.
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
    """Price memory until the prices are the best; None where no mixture of the known
    choices fits.

    Args:
      overlap: the problem.
      incumbents: known choices; takes what is found.
      free: the problem solved without memory.
      weight: of what can hide, there.
      effort: limits.
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
        if upper - bound <= CLOSE * upper or time.monotonic() > effort.deadline:
            break
        is_long = left == 0 or stale == STALE_PRICES
        if stale > STALE_PRICES or (is_long and long == 0):
            break
        least = NEWS * (upper - bound)
        # Where the last price met nothing new, go all the way.
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
    # What is mixed first, then what is cheapest.
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
    return solve_pairwise(problem, starts, effort, before)
