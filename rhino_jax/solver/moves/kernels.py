"""Kernel search: CP-SAT on promising options, more of them each time.

For every node, the options of good assignments, and those with small regret at the best
memory multipliers.

Source: kernel search: Angelelli, Mansini, Speranza, "Kernel search: a general heuristic
for the multi-dimensional knapsack problem", Computers & OR 37 (2010).
"""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from rhino_jax.solver.bounds.time_prices import TimeCosted
from rhino_jax.solver.cpsat import settle
from rhino_jax.solver.limited import Limited


SHARES = (0.0, 0.2, 0.4, 0.6)
"""Shares of all options that kernels have in addition to those of good assignments."""

MAX_CHOICES = 16
"""Number of good assignments whose options all kernels have."""

LARGEST = 40_000
"""Largest number of edge variables of a kernel."""

KERNEL_SHARE = 0.25
"""Share of the remaining time that CP-SAT has for a kernel."""


def search_kernels(search: Limited, priced: TimeCosted, until: float) -> None:
    """Solve kernels of increasing size, while time is left.

    Args:
      search: the core; receives assignments.
      priced: result of the search for multipliers.
      until: deadline, as `time.monotonic()`.
    """
    first = search.memory.first
    nodes = range(len(first) - 1)
    before = 0
    for share in SHARES:
        left = until - time.monotonic()
        if left <= 0 or not search.is_open:
            return
        allowed = _allowed(search, priced, share)
        cells = sum(
            len(allowed[n]) * len(allowed[m])
            for n in nodes
            for m, _ in search.moves.neighbours[n]
            if n < m
        )
        if cells > LARGEST:
            break
        options = sum(map(len, allowed.values()))
        if options == before:
            continue
        before = options
        limits = replace(search.limits(), seconds=KERNEL_SHARE * left)
        found = settle(search.moves, _start(search, priced), nodes, limits, allowed)
        if found.labels is not None:
            search.offer(found.labels)


def _start(search: Limited, priced: TimeCosted) -> np.ndarray:
    """Return the hint: the best assignment, or the most promising one."""
    if search.best is not None:
        return search.best
    if priced.choices:
        return priced.choices[0]
    return np.zeros(len(search.memory.first) - 1, dtype=int)


def _allowed(
    search: Limited, priced: TimeCosted, share: float
) -> dict[int, np.ndarray]:
    """Return node → the options of a kernel."""
    first = search.memory.first
    is_in = priced.regrets <= np.quantile(priced.regrets, share)
    for labels in (*priced.choices[:MAX_CHOICES], _start(search, priced)):
        is_in[first[:-1] + labels] = True
    return {
        n: np.flatnonzero(is_in[first[n] : first[n + 1]]) for n in range(len(first) - 1)
    }
