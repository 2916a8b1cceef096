"""Sequential tree-reweighted message passing: a bound, a choice, and pruning.

Every node in turn collects what its neighbours would pay for each of its options
and hands a share on. The sum of what is sure to be paid is a lower bound on the
objective; choosing greedily along the way gives a solution; an option whose
surplus over the bound exceeds a known solution can never be in a better one.

Source: Kolmogorov, "Convergent tree-reweighted message passing for energy
minimization", PAMI 28 (2006), section 5 (TRW-S).
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from rhino_jax.search.local_search import descend
from rhino_jax.search.reduction import Core


@dataclass(slots=True, eq=False)
class Passing:
    """What message passing found.

    Attributes:
      labels: node → option, the best choice met.
      value: its objective.
      bound: proved lower bound.
      alive: node → mask of options that a better solution may still use.
      met: node → mask of options that some good choice used.
    """

    labels: dict[int, int]
    value: float
    bound: float
    alive: dict[int, np.ndarray]
    met: dict[int, np.ndarray]


def value_of(core: Core, labels: dict[int, int]) -> float:
    """Objective of a choice over the core."""
    total = sum(float(c[labels[i]]) for i, c in core.costs.items())
    for i, around in core.tables.items():
        for j, table in around.items():
            if i < j:
                total += float(table[labels[i], labels[j]])
    return total


def pass_messages(
    core: Core,
    order: list[int],
    starts: list[dict[int, int]],
    *,
    max_rounds: int = 60,
    tolerance: float = 1e-4,
    deadline: float = float("inf"),
) -> Passing:
    """Run rounds until the bound meets the best choice or stops rising.

    Args:
      core: the pairwise problem.
      order: its nodes in a fixed order, neighbours close together.
      starts: known choices (recipes); they are improved by local search first.
      max_rounds: forward and backward sweeps.
      tolerance: stop when (value - bound) / value is below it.
      deadline: `time.monotonic()` after which no new round begins.
    """
    rank = {node: r for r, node in enumerate(order)}
    later = {i: [j for j in core.tables[i] if rank[j] > rank[i]] for i in order}
    sooner = {i: [j for j in core.tables[i] if rank[j] < rank[i]] for i in order}
    messages = {
        (i, j): np.zeros(len(core.costs[j])) for i in order for j in core.tables[i]
    }
    alive = {i: np.ones(len(core.costs[i]), dtype=bool) for i in order}
    met = {i: np.zeros(len(core.costs[i]), dtype=bool) for i in order}
    best: dict[int, int] = {}
    best_value, bound = np.inf, -np.inf
    for start in starts:
        labels = descend(core, order, start)
        _remember(met, labels)
        value = value_of(core, labels)
        if value < best_value:
            best, best_value = labels, value
    stalled = 0
    for _ in range(max_rounds):
        forward = _sweep(core, order, later, sooner, messages)
        backward = _sweep(core, order[::-1], sooner, later, messages)
        labels = descend(core, order, backward.labels)
        _remember(met, labels)
        value = value_of(core, labels)
        if value < best_value - 1e-12 * abs(value):
            best, best_value, stalled = labels, value, 0
        new_bound = backward.bound
        gain = new_bound - bound
        bound = max(bound, new_bound)
        _prune(order, forward, backward, best_value, alive)
        slack = best_value - bound
        if slack <= tolerance * abs(best_value):
            break
        stalled = stalled + 1 if gain < 2e-3 * slack else 0
        if stalled >= 5 or time.monotonic() > deadline:
            break
    if not order:
        best, best_value, bound = {}, 0.0, 0.0
    return Passing(best, best_value, min(bound, best_value), alive, met)


def _remember(met: dict[int, np.ndarray], labels: dict[int, int]) -> None:
    for i, label in labels.items():
        met[i][label] = True


@dataclass(slots=True, eq=False)
class _Sweep:
    """One sweep: bound, greedy labels, and each node's part of the bound."""

    bound: float
    labels: dict[int, int]
    kept: dict[int, float]
    sent: dict[tuple[int, int], float]
    collected: dict[int, np.ndarray]


def _sweep(
    core: Core,
    order: list[int],
    ahead: dict[int, list[int]],
    behind: dict[int, list[int]],
    messages: dict[tuple[int, int], np.ndarray],
) -> _Sweep:
    """Visit nodes in order, passing messages to those that are still ahead."""
    labels: dict[int, int] = {}
    kept: dict[int, float] = {}
    sent: dict[tuple[int, int], float] = {}
    collected: dict[int, np.ndarray] = {}
    for i in order:
        total = core.costs[i].copy()
        choice = core.costs[i].copy()
        for j in core.tables[i]:
            total += messages[j, i]
        for j in behind[i]:
            choice += core.tables[i][j][:, labels[j]]
        for j in ahead[i]:
            choice += messages[j, i]
        labels[i] = int(np.argmin(choice))
        collected[i] = total
        share = 1.0 / max(len(ahead[i]), len(behind[i]), 1)
        kept[i] = (1.0 - share * len(ahead[i])) * float(total.min())
        for j in ahead[i]:
            outgoing = share * total - messages[j, i]
            message = (outgoing[:, None] + core.tables[i][j]).min(axis=0)
            low = float(message.min())
            sent[i, j] = low
            messages[i, j] = message - low
    return _Sweep(
        sum(kept.values()) + sum(sent.values()), labels, kept, sent, collected
    )


def _prune(
    order: list[int],
    forward: _Sweep,
    backward: _Sweep,
    best_value: float,
    alive: dict[int, np.ndarray],
) -> None:
    """Drop options whose min-marginal exceeds the best known value.

    While the backward sweep stands at node i, the parts of the bound are: forward
    parts of the nodes before i, backward parts of those after it, and all that i
    has collected.
    """
    bound = forward.bound
    slack = 1e-9 * abs(best_value) + 1e-15
    into: dict[int, list[float]] = {i: [] for i in order}
    for (_, j), value in forward.sent.items():
        into[j].append(value)
    out_back: dict[int, list[float]] = {i: [] for i in order}
    for (i, _), value in backward.sent.items():
        out_back[i].append(value)
    for i in reversed(order):
        bound -= forward.kept[i]
        total = backward.collected[i]
        alive[i] &= bound + total <= best_value + slack
        if not alive[i].any():
            alive[i][int(np.argmin(total))] = True
        bound += backward.kept[i] + sum(out_back[i]) - sum(into[i])
