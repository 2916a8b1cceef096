"""Large-neighbourhood search: CP-SAT on one part of the core after the other.

Source: Shaw, "Using constraint programming and local search methods to solve vehicle
routing problems", CP 1998.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from rhino_jax.solver.cpsat import CpSatLimits, settle
from rhino_jax.solver.moves.moves import Moves
from rhino_jax.solver.parameters import NEIGHBOURHOODS


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
