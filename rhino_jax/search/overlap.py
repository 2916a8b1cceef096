"""Collectives that hide behind compute: a budget that compute provides once.

With C seconds of compute, A seconds of collectives and reshards, and a share s of
compute behind which they can hide, a step takes

    T = C + max(0, A - s·C) = max over w in [0, 1] of (1 - w·s)·C + w·A.

For a fixed w the right side is an ordinary problem, whose bound is a bound on T. At
w = 1 it is T itself where something stays exposed; where all is hidden, smaller
weights trade collectives for compute.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rhino_jax.search.pool import Effort, Report
from rhino_jax.search.problem import Labels, PairTable, Problem
from rhino_jax.search.reduction import adjacency
from rhino_jax.search.solve import Solution, solve


MAX_WEIGHTS = 4
"""Weights that are tried; each costs a search."""


@dataclass(frozen=True, slots=True, eq=False)
class Overlap:
    """What of a problem's objective is compute, and how much can hide behind it.

    Attributes:
      problem: its objective adds up compute and collectives.
      compute: for every node, the seconds of each option that are compute.
      share: s above.
    """

    problem: Problem
    compute: list[np.ndarray]
    share: float

    def hidden_s(self, labels: Labels) -> float:
        """Seconds of collectives that hide behind compute."""
        compute_s = sum(float(c[labels[i]]) for i, c in enumerate(self.compute))
        others_s = self.problem.objective(labels) - compute_s
        return max(0.0, min(others_s, self.share * compute_s))

    def step_s(self, labels: Labels) -> float:
        """T above."""
        return self.problem.objective(labels) - self.hidden_s(labels)

    def is_exposed(self, labels: Labels) -> bool:
        """Whether the budget is used up."""
        compute_s = sum(float(c[labels[i]]) for i, c in enumerate(self.compute))
        return self.problem.objective(labels) - compute_s >= self.share * compute_s

    def weighted(self, weight: float) -> Problem:
        """The problem whose objective is (1 - w·s)·C + w·A."""
        of_compute = 1 - weight * self.share - weight
        return replace(
            self.problem,
            costs=[
                weight * total + of_compute * compute
                for total, compute in zip(self.problem.costs, self.compute, strict=True)
            ],
            edges=[
                PairTable(e.source, e.target, weight * e.table)
                for e in self.problem.edges
            ],
        )


def solve_overlapped(
    overlap: Overlap, starts: Sequence[Labels], effort: Effort, report: Report
) -> Solution:
    """Minimise T. The result is never worse than the best start that fits."""
    problem = overlap.problem
    if overlap.share == 0:
        return solve(problem, starts, effort, report)
    known = [s for s in starts if problem.peak(s) <= problem.limit]
    best = min(known, key=overlap.step_s, default=None)
    bound, low, high, weight = 0.0, 0.0, 1.0, 1.0
    found: Solution | None = None
    for _ in range(MAX_WEIGHTS):
        found = solve(overlap.weighted(weight), starts, effort)
        bound = max(bound, found.bound)
        if found.labels is None:
            return found
        polished = _descend(overlap, found.labels)
        if best is None or overlap.step_s(polished) < overlap.step_s(best):
            best = polished
        report(overlap.step_s(best), bound)
        if overlap.is_exposed(found.labels):
            low = weight
        else:
            high = weight
        if low == 1.0 or time.monotonic() > effort.deadline:
            break
        weight = (low + high) / 2
    assert found is not None and best is not None
    value = overlap.step_s(best)
    return replace(
        found,
        labels=best,
        objective=value,
        bound=min(bound, value),
        peak=problem.peak(best),
    )


def _descend(overlap: Overlap, start: Labels, rounds: int = 4) -> Labels:
    """Move single nodes to the option with the smallest T, within the memory limit:
    between two weights lie choices that no weight makes best."""
    core, problem = adjacency(overlap.problem), overlap.problem
    labels = np.array(start)
    total = problem.objective(labels)
    compute = sum(float(c[labels[i]]) for i, c in enumerate(overlap.compute))
    for _ in range(rounds):
        moved = False
        for i, cost in core.costs.items():
            around = cost
            for j, table in core.tables[i].items():
                around = around + table[:, labels[j]]
            totals = total + around - around[labels[i]]
            computes = compute + overlap.compute[i] - overlap.compute[i][labels[i]]
            others = totals - computes
            steps = computes + np.maximum(0.0, others - overlap.share * computes)
            option = int(np.argmin(steps))
            if steps[option] >= steps[labels[i]] * (1 - 1e-9):
                continue
            before = labels[i]
            labels[i] = option
            if problem.peak(labels) > problem.limit:
                labels[i] = before
                continue
            total, compute, moved = float(totals[option]), float(computes[option]), True
        if not moved:
            break
    return labels
