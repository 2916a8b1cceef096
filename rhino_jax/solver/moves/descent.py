"""Descent of T by moves of single nodes: see `overlap`."""

from __future__ import annotations

import numpy as np

from rhino_jax.solver.overlap import Overlap
from rhino_jax.solver.parameters import MOVES
from rhino_jax.solver.problem import Labels


def descend(overlap: Overlap, start: Labels, rounds: int = MOVES.most_passes) -> Labels:
    """Move single nodes to the option with the smallest T, within the memory limit.

    Between two weights there are assignments that are optimal at no weight.
    """
    problem, share = overlap.problem, overlap.share
    labels = np.array(start)
    if not len(labels):
        return labels
    # Total, hidable and compute seconds of the assignment.
    values = np.array(
        [p.objective(labels) for p in (problem, overlap.hidable, overlap.compute)]
    )
    total, hidable = problem.beside(), overlap.hidable.beside()
    total_own, hidable_own = total.own(), hidable.own()
    compute, first = np.concatenate(overlap.compute.costs), total.first

    def step_s(parts: np.ndarray) -> np.ndarray:
        return parts[0] - np.minimum(parts[1], share * parts[2])

    for _ in range(rounds):
        moved = False
        chosen = first[:-1] + labels
        every = np.stack(
            [
                total_own + total.pairs(labels),
                hidable_own + hidable.pairs(labels),
                compute,
            ]
        )
        now = np.repeat(every[:, chosen], np.diff(first), axis=1)
        steps = step_s(values[:, None] + every - now)
        least = np.minimum.reduceat(steps, first[:-1])
        gains = least < steps[chosen] * (1 - MOVES.least_gain)
        for i in np.flatnonzero(gains).tolist():
            before = labels[i]
            own = compute[first[i] : first[i + 1]]
            mine = np.stack(
                [
                    total.one(i, total_own, labels),
                    hidable.one(i, hidable_own, labels),
                    own,
                ]
            )
            mine += (values - mine[:, before])[:, None]
            steps = step_s(mine)
            option = int(steps.argmin())
            if steps[option] >= steps[before] * (1 - MOVES.least_gain):
                continue
            labels[i] = option
            if problem.peak(labels) > problem.limit:
                labels[i] = before
                continue
            values, moved = mine[:, option], True
        if not moved:
            break
    return labels
