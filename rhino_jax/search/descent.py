"""Single nodes moved to where T is smallest: see `overlap`."""

from __future__ import annotations

import numpy as np

from rhino_jax.search.overlap import Overlap
from rhino_jax.search.problem import Labels
from rhino_jax.search.reduction import adjacency


def descend(overlap: Overlap, start: Labels, rounds: int = 4) -> Labels:
    """Move single nodes to the option with the smallest T, within the memory limit:
    between two weights lie choices that no weight makes best."""
    core, problem = adjacency(overlap.problem), overlap.problem
    hidden_core = adjacency(overlap.hidable)
    labels = np.array(start)
    total, hidden = problem.objective(labels), overlap.hidable.objective(labels)
    of_compute = overlap.compute.costs
    compute = overlap.compute.objective(labels)
    for _ in range(rounds):
        moved = False
        for i, cost in core.costs.items():
            around = cost
            for j, table in core.tables[i].items():
                around = around + table[:, labels[j]]
            hiding = hidden_core.costs[i]
            for j, table in hidden_core.tables[i].items():
                hiding = hiding + table[:, labels[j]]
            totals = total + around - around[labels[i]]
            hiddens = hidden + hiding - hiding[labels[i]]
            computes = compute + of_compute[i] - of_compute[i][labels[i]]
            steps = totals - np.minimum(hiddens, overlap.share * computes)
            option = int(np.argmin(steps))
            if steps[option] >= steps[labels[i]] * (1 - 1e-9):
                continue
            before = labels[i]
            labels[i] = option
            if problem.peak(labels) > problem.limit:
                labels[i] = before
                continue
            total, hidden = float(totals[option]), float(hiddens[option])
            compute, moved = float(computes[option]), True
        if not moved:
            break
    return labels
