"""The search where the memory limit binds.

Memory gets prices at the times that overflow (a Lagrangian relaxation, whose optimum
less the priced limit is a lower bound), together with what can hide: see `prices`. The
choices that are cheapest at the best prices, whether they fit or not, are what a good
choice that fits is merged of: see `merge`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rhino_jax.search.overlap import Overlap
from rhino_jax.search.pairwise import Found, solve_pairwise
from rhino_jax.search.pool import Effort, Pool
from rhino_jax.search.prices import Mixture, Prices
from rhino_jax.search.problem import Labels


ROUNDS_PER_PRICE = 5
"""Rounds of messages at every price: those of the price before go on."""

STEP = 0.5
"""How far towards the prices that look best: all the way they swing, since a few
choices say little.

Source: Ben-Ameur, Neto, "Acceleration of cutting-plane and column generation
algorithms", Networks 49 (2007)."""

NEWS = 0.1
"""Share of what is open, by which less is no news."""

STALE_PRICES = 2
"""Prices in a row without news, after which there are no better ones."""

MOST_MERGED = 4
"""Choices that are merged with the best that fits."""


@dataclass(frozen=True, slots=True, eq=False)
class Priced:
    """What the best prices say.

    Attributes:
      weight: of what can hide.
      near: the choices that are cheapest there, whether they fit or not.
      bound: no choice that fits costs less.
    """

    weight: float
    near: tuple[Labels, ...]
    bound: float


def search_memory(
    overlap: Overlap, pool: Pool, free: Found, weight: float, effort: Effort
) -> Priced | None:
    """Price memory until the prices are the best; None where no mixture of the known
    choices fits.

    Args:
      overlap: the problem.
      pool: known choices; takes what is found.
      free: the problem solved without memory.
      weight: of what can hide, there.
      effort: limits.
    """
    mixture = Mixture(overlap)
    for member in pool.members:
        mixture.add(member)
    brief = replace(
        effort, deterministic_s=0.0, max_rounds=ROUNDS_PER_PRICE, max_fusions=0
    )
    centre, bound, found = Prices(weight), free.bound, free
    before, stale = math.inf, 0
    for _ in range(effort.max_prices):
        best = mixture.solve()
        if best is None:
            return None
        upper, target = best
        is_close = upper - bound <= effort.near * upper
        if is_close or stale == STALE_PRICES or time.monotonic() > effort.deadline:
            break
        least = NEWS * (upper - bound)
        # Where the last price met nothing new, go all of the way.
        has_news = before - upper > least
        query, before = centre.towards(target, STEP if has_news else 1.0), upper
        found = _at(overlap, query, pool.members[-2:], brief, found)
        proved = found.bound - query.paid(overlap.problem.limit)
        stale = 0 if has_news or proved - bound > least else stale + 1
        if proved > bound:
            centre, bound = query, proved
        mixture.add(found.labels)
        pool.offer(found.labels)
    if effort.proves:
        # The same prices again, with all rounds of messages.
        found = _at(overlap, centre, pool.members[-2:], effort, found)
        bound = max(bound, found.bound - centre.paid(overlap.problem.limit))
        pool.offer(found.labels)
    priced = overlap.weighted(centre.weight).priced(centre.memory)
    near = {c.tobytes(): c for c in sorted(pool.members, key=priced.objective)}
    return Priced(centre.weight, tuple(near.values())[:MOST_MERGED], bound)


def _at(
    overlap: Overlap,
    prices: Prices,
    starts: Sequence[Labels],
    effort: Effort,
    before: Found,
) -> Found:
    problem = overlap.weighted(prices.weight).priced(prices.memory)
    return solve_pairwise(problem, starts, effort, before)
