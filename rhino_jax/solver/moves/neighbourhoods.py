"""CP-SAT on parts of a core: kernels of promising options, and neighbourhoods of nodes.

Kernel search has, for every node, the options of good assignments, and those with small
regret at the best memory multipliers; more of them each time. Large-neighbourhood
search takes one part of the core after the other.

Source: kernel search: Angelelli, Mansini, Speranza, "Kernel search: a general heuristic
for the multi-dimensional knapsack problem", Computers & OR 37 (2010). Neighbourhoods:
Shaw, "Using constraint programming and local search methods to solve vehicle routing
problems", CP 1998.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from rhino_jax.solver.bounds.time_prices import TimeCosted
from rhino_jax.solver.cpsat import CpSatLimits, settle
from rhino_jax.solver.limited import Limited
from rhino_jax.solver.moves.moves import Moves
from rhino_jax.solver.parameters import NEIGHBOURHOODS


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


Offer = Callable[[np.ndarray], object]


def search_neighbourhoods(
    moves: Moves,
    labels: np.ndarray,
    offer: Offer,
    limits: CpSatLimits,
) -> np.ndarray:
    """Improve an assignment that fits, until the deadline.

    Args:
      moves: costs and memory of the core.
      labels: an assignment within the memory limit.
      offer: called with every better assignment.
      limits: limits of all neighbourhoods together, except `deterministic_s` and
        `workers`, which apply to each.
    """
    deadline = time.monotonic() + limits.seconds
    rng = np.random.default_rng(limits.seed)
    value = moves.objective(labels)
    cells = NEIGHBOURHOODS.first_cells
    visits = np.zeros(len(labels))
    while (left := deadline - time.monotonic()) > 0.05 and len(labels):
        first = moves.memory.first
        totals = moves.totals(moves.costs, labels)
        own = totals[first[:-1] + labels]
        regret = own - np.minimum.reduceat(totals, first[:-1])
        weight = (regret + own.mean() * 1e-2 + 1e-9) / (1 + visits) ** 2
        nodes = _around(moves, _starts(moves, labels, weight, rng), cells, rng)
        visits[nodes] += 1
        seed = int(rng.integers(2**31))
        mine = replace(limits, seconds=min(NEIGHBOURHOODS.settle_s, left), seed=seed)
        found = settle(moves, labels, nodes, mine)
        factor = NEIGHBOURHOODS.larger if found.is_optimal else NEIGHBOURHOODS.smaller
        least, most = NEIGHBOURHOODS.first_cells / 4, NEIGHBOURHOODS.most_cells
        cells = int(min(max(cells * factor, least), most))
        if found.labels is not None:
            better = moves.objective(found.labels)
            if better < value:
                labels, value = found.labels, better
                offer(labels)
    return labels


def _starts(
    moves: Moves, labels: np.ndarray, weight: np.ndarray, rng: np.random.Generator
) -> list[int]:
    """Return a random node; or some with memory at a time that is nearly full.

    Memory that one of these frees another may use.
    """
    memory = moves.memory
    full = np.flatnonzero(
        memory.room - memory.profile(labels)
        <= NEIGHBOURHOODS.nearly_full * memory.limit
    )
    if not len(full) or rng.random() < 0.5:
        return [int(rng.choice(len(labels), p=weight / weight.sum()))]
    spans, at = memory.spans, rng.choice(full)
    live = (spans.start <= at) & (at < spans.stop)
    ends = spans.lookups.source[live], spans.lookups.target[live]
    nodes = np.unique(np.concatenate(ends))
    chance = weight[nodes] / weight[nodes].sum()
    count = min(NEIGHBOURHOODS.traders, len(nodes))
    return rng.choice(nodes, count, replace=False, p=chance).tolist()


def _around(
    moves: Moves, starts: list[int], cells: int, rng: np.random.Generator
) -> list[int]:
    """Return nodes near some others, until their edges have `cells` entries."""
    inside = set(starts)
    todo = deque(starts)
    while todo and cells > 0:
        near = moves.neighbours[todo.popleft()]
        for k in rng.permutation(len(near)):
            node = near[k][0]
            if node in inside:
                continue
            cost = sum(t.size for j, t in moves.neighbours[node] if j in inside)
            if cost > cells:
                continue
            cells -= cost
            inside.add(node)
            todo.append(node)
    return sorted(inside)
