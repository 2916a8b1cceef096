"""Local search over a pairwise problem: change one node, or a pair, at a time."""

from __future__ import annotations

from collections import deque

import numpy as np

from rhino_jax.search.reduction import Core


def descend(core: Core, order: list[int], start: dict[int, int]) -> dict[int, int]:
    """Move single nodes to their best option until none gains.

    Args:
      core: the pairwise problem.
      order: nodes in the order in which they are first visited.
      start: a choice for every node.
    """
    labels = dict(start)
    queue = deque(order)
    waiting = set(order)
    while queue:
        i = queue.popleft()
        waiting.discard(i)
        total = core.costs[i]
        for j, table in core.tables[i].items():
            total = total + table[:, labels[j]]
        best = int(np.argmin(total))
        if total[best] < total[labels[i]] * (1 - 1e-12) - 1e-18:
            labels[i] = best
            for j in core.tables[i]:
                if j not in waiting:
                    waiting.add(j)
                    queue.append(j)
    return labels
