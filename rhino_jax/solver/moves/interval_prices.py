"""Memory multipliers per interval of a node: assignments that fit, quickly.

Multipliers rise where memory overflows and fall elsewhere; at given multipliers,
messages and forest moves build an assignment, which is repaired and improved.

Source: multipliers per node, updated by overflows during its lifetime, are the contest
winners' (Staudt, Blacher, "Soft Constraints, Strong Solutions", 2025).
"""

from __future__ import annotations

import time

import numpy as np

from rhino_jax.solver.bounds.messages import Messages
from rhino_jax.solver.limited import Limited
from rhino_jax.solver.parameters import INTERVAL_PRICES


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
