"""Memory multipliers: per interval of a node, for assignments that fit; per time, for a
bound.

Multipliers per interval rise where memory overflows and fall elsewhere; at given
multipliers, messages and forest moves build an assignment, which is repaired and
improved.

At multipliers λ ≥ 0 of the times, no assignment that fits costs less than

    min over x of  Σ costs(x) + Σ_t λ_t · (memory of x at t - room at t),

which messages bound from below. The best λ are found from known assignments (see
`prices`). Every assignment is also a start; assignments are built at λ and at its
multiples, since with tight memory even the best multipliers leave some over the limit.

Source: multipliers per node, updated by overflows during its lifetime, are the contest
winners' (Staudt, Blacher, "Soft Constraints, Strong Solutions", 2025).
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from rhino_jax.solver.bounds.messages import Messages
from rhino_jax.solver.bounds.prices import Mixture, TimePrices
from rhino_jax.solver.limited import Limited
from rhino_jax.solver.parameters import INTERVAL_PRICES


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


def price_intervals(search: Limited, until: float) -> None:
    """Search for assignments that fit by Lagrangian relaxation of memory.

    Runs until the deadline; if no other method follows, until one is found.

    Args:
      search: the core; receives bounds and assignments.
      until: deadline, as `time.monotonic()`.
    """
    moves, memory = search.moves, search.memory
    limit = max(memory.limit, 1.0)
    messages = Messages(moves)
    labels = _least_memory(search)
    for _ in range(INTERVAL_PRICES.first_sweeps):
        bound = messages.round(search.costs)
        search.prove(bound - INTERVAL_PRICES.rounding * abs(bound))
        if time.monotonic() > until:
            break
    prices = np.full(len(memory.largest), max(search.bound, 1.0) / limit / 100)
    has_fitted, step = False, 0
    while True:
        priced = search.costs + memory.priced(prices)
        for _ in range(INTERVAL_PRICES.sweeps):
            messages.sweep(priced, 0)
            messages.sweep(priced, 1, labels)
        for _ in range(INTERVAL_PRICES.forest_moves):
            labels = moves.forest_move(priced, labels, search.rng)
        search.take(labels)
        now = time.monotonic()
        if not len(prices) or not search.is_open:
            return
        is_elsewhere = search.is_whole or search.is_priced
        if now > until and (
            search.best is not None or is_elsewhere or now > search.deadline
        ):
            return
        over = memory.profile(labels) - memory.room
        has_fitted = (
            has_fitted or over.max(initial=0.0) <= INTERVAL_PRICES.nearly * limit
        )
        if not has_fitted:
            prices = prices * INTERVAL_PRICES.rise
            continue
        fill = 1 + memory.fullest(over) / limit
        fill = np.clip(fill, INTERVAL_PRICES.least_fill, INTERVAL_PRICES.most_fill)
        power = INTERVAL_PRICES.rate / (1 + step / INTERVAL_PRICES.slowing)
        prices = prices * fill**power
        step += 1


def _least_memory(search: Limited) -> np.ndarray:
    """Return (and record) an assignment with little memory, so that one exists."""
    moves, memory = search.moves, search.memory
    price = moves.forbidden / 10 / max(memory.largest.sum(), 1.0)
    costs = search.costs + memory.priced(np.full(len(memory.largest), price))
    labels = np.zeros(len(memory.first) - 1, dtype=int)
    for _ in range(INTERVAL_PRICES.forest_moves):
        labels = moves.forest_move(costs, labels, search.rng)
    search.take(labels)
    return labels
