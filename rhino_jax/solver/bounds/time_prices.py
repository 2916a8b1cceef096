"""The best prices of memory per time: a bound, and which options are worth a thought.

At prices λ ≥ 0 of the times, no choice that fits costs less than

    min over x of  Σ costs(x) + Σ_t λ_t · (memory of x at t - room at t),

which messages bound from below. The best λ are found from the choices that were met
(see `prices`). Every one of them is a start: choices are made at λ and at its
multiples, since where memory is tight even the best prices leave choices over it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from rhino_jax.solver.bounds.messages import Messages
from rhino_jax.solver.bounds.prices import Mixture, TimePrices
from rhino_jax.solver.limited import Limited


SWEEPS, FOREST_MOVES = 2, 4
"""Sweeps over all messages for each price, there and back, and moves."""

STEP, SHORTEST, FULL_STEPS = 0.5, 7, 4
"""How far towards the prices that look best, as the planner's; half as far after each
that gave no better bound, up to so many times; every so many prices all the way."""

CLOSE, STALLED = 1e-3, 60
"""Share of the dual's value that may stay open; prices after which there is no more to
gain where bound and dual together have moved by less than a hundredth of what is
open."""

DEAR = 50.0
"""What a mixture pays, as a multiple of the first choice, for what holds no memory at
all: it keeps prices finite while no mixture of the known choices fits."""

MULTIPLES = (1.5, 3.0, 10.0, 100.0)
"""Of the best prices: at each a choice is made that holds less."""


@dataclass(frozen=True, slots=True, eq=False)
class TimePriced:
    """Attributes:
    choices: the most promising first, whether they fit or not.
    regrets: of every option, what it costs more than its node's best at the best
        prices, as far as messages know.
    """

    choices: list[np.ndarray]
    regrets: np.ndarray


def price_times(search: Limited, until: float) -> TimePriced:
    """Find the best prices, until the time given.

    Args:
      search: the core; takes bounds and choices.
      until: of `time.monotonic()`.
    """
    run = _PriceSearch(search)
    bounds: list[float] = []
    uppers: list[float] = []
    centre = target = TimePrices(1.0)
    query, best, fails = centre, -np.inf, 0
    while True:
        bound = run.ask(query)
        fails += 1
        if bound > best:
            best, centre, fails = bound, query, 0
        bounds.append(best)
        search.prove(best - abs(best) * 1e-9)
        found = run.mixture.solve()
        assert found is not None, "memory that is paid for fits"
        upper, target, shares = found
        uppers.append(upper)
        if not search.is_open or upper - best <= CLOSE * abs(upper):
            break
        is_stalled = False
        if len(bounds) > STALLED:
            news = best - bounds[-STALLED] + uppers[-STALLED] - upper
            is_stalled = news < (upper - best) / 100
        if is_stalled or time.monotonic() > until:
            break
        share = STEP ** (1 + fails % SHORTEST) if len(bounds) % FULL_STEPS else 1.0
        query = centre.towards(target, share)
    order = np.argsort(-shares[1:], kind="stable")
    choices = [run.met[k] for k in order]
    for factor in MULTIPLES:
        memory = {t: factor * price for t, price in target.memory.items()}
        run.ask(TimePrices(1.0, memory))
        choices = [*run.met[-1:], *choices]
    return TimePriced(choices, run.regrets(target))


class _PriceSearch:
    def __init__(self, search: Limited) -> None:
        self.search = search
        self.messages = Messages(search.moves)
        self.labels = np.zeros(len(search.memory.first) - 1, dtype=int)
        self.met: list[np.ndarray] = []
        self.mixture = Mixture(max(search.memory.limit, 1.0))
        self.has_begun = False

    def priced(self, prices: TimePrices) -> np.ndarray:
        memory = self.search.memory
        return self.search.costs + memory.priced(memory.spans.rates(prices.memory))

    def ask(self, prices: TimePrices) -> float:
        """Make a choice at some prices; says what no choice that fits is below."""
        moves, memory = self.search.moves, self.search.memory
        priced = self.priced(prices)
        for _ in range(SWEEPS):
            self.messages.sweep(priced, 0)
            bound = self.messages.sweep(priced, 1, self.labels)
        for _ in range(FOREST_MOVES):
            self.labels = moves.forest_move(priced, self.labels, self.search.rng)
        self.search.take(self.labels)
        value = moves.objective(self.labels)
        if not self.has_begun:
            dear = DEAR * max(value if value < moves.forbidden else bound, 1.0)
            self.mixture.add((dear, dear), np.zeros(len(memory.room)))
            self.has_begun = True
        if value < moves.forbidden:
            over = memory.profile(self.labels) - memory.room
            self.mixture.add((value, value), 1 + over / max(memory.limit, 1.0))
            self.met.append(self.labels.copy())
        return bound - sum(p * memory.room[t] for t, p in prices.memory.items())

    def regrets(self, prices: TimePrices) -> np.ndarray:
        """Of every option, as of `TimePriced`."""
        first, priced = self.search.memory.first, self.priced(prices)
        for way in (0, 1) * SWEEPS:
            self.messages.sweep(priced, way)
        totals = self.messages.totals(priced)
        least = np.minimum.reduceat(totals, first[:-1])
        return totals - np.repeat(least, np.diff(first))
