"""The best memory multiplier per time: a bound, and the options worth searching.

At multipliers λ ≥ 0 of the times, no assignment that fits costs less than

    min over x of  Σ costs(x) + Σ_t λ_t · (memory of x at t - room at t),

which messages bound from below. The best λ are found from known assignments (see
`prices`). Every assignment is also a start; assignments are built at λ and at its
multiples, since with tight memory even the best multipliers leave some over the limit.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from rhino_jax.solver.bounds.messages import Messages
from rhino_jax.solver.bounds.prices import Mixture, TimePrices
from rhino_jax.solver.limited import Limited


SWEEPS, FOREST_MOVES = 2, 4
"""Sweeps over all messages, in both orders, and moves, per multiplier."""

STEP, SHORTEST, FULL_STEPS = 0.5, 7, 4
"""Share of the way to the master problem's multipliers (as in `memory_search`); halved
after each query without a better bound, starting over after SHORTEST of these; every
FULL_STEPS queries, all the way."""

CLOSE, STALLED = 1e-3, 60
"""Gap to the dual's value, as a share of it, at which the search stops; and number of
queries after which it stops if bound and dual together have moved by less than a
hundredth of the gap."""

DEAR = 50.0
"""Cost, as a multiple of the first assignment's, of an artificial one without memory:
it keeps multipliers finite while no combination of known assignments fits."""

MULTIPLES = (1.5, 3.0, 10.0, 100.0)
"""Factors on the best multipliers, for assignments with less memory."""


@dataclass(frozen=True, slots=True, eq=False)
class TimeCosted:
    """The result of the search for multipliers.

    Attributes:
      choices: assignments, the most promising first, whether they fit or not.
      regrets: by option, its excess over its node's best option at the best
        multipliers, according to messages.
    """

    choices: list[np.ndarray]
    regrets: np.ndarray


def price_times(search: Limited, until: float) -> TimeCosted:
    """Search for the best multipliers of memory.

    Args:
      search: the core; receives bounds and assignments.
      until: deadline, as `time.monotonic()`.
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
    return TimeCosted(choices, run.regrets(target))


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
        """Build an assignment at some multipliers; return a bound on those that fit."""
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
        """Return the regret of every option, see `TimeCosted`."""
        first, priced = self.search.memory.first, self.priced(prices)
        for way in (0, 1) * SWEEPS:
            self.messages.sweep(priced, way)
        totals = self.messages.totals(priced)
        least = np.minimum.reduceat(totals, first[:-1])
        return totals - np.repeat(least, np.diff(first))
