"""Collectives that hide behind compute: a budget that compute provides once.

With C seconds of compute, H of collectives that can be hidden, A of all others, and a
share s of compute behind which they can hide, a step takes

    T = C + A + max(0, H - s·C) = max over w in [0, 1] of (1 - w·s)·C + A + w·H.

For a fixed w the right side is an ordinary problem, whose bound is a bound on T. At
w = 1 it is T itself where something stays exposed; where all is hidden, smaller
weights trade collectives for compute.

What can be hidden is a share of what has slack (see `slack`): compilers start only
some collectives early, and what runs beside compute takes memory and cores from it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rhino_jax.search.pool import Effort, Report
from rhino_jax.search.problem import Labels, PairTable, Problem, Scaled
from rhino_jax.search.reduction import adjacency
from rhino_jax.search.slack import Slack
from rhino_jax.search.solve import Solution, solve


HIDDEN_WEIGHT = 0.1
"""The weight that is tried where all that can be hidden is hidden: the best of several
such choices then is one that hides less."""

LEAST_WEIGHT = 1e-3
"""The weight at which such choices are bounded. What hides is then as good as free."""

PREFERRED = 1e-3
"""Share of T that a choice found at the least weight must save, since it hides more."""

BRIEFLY_NEAR = 0.03
"""How near to the bound a choice need be at a weight whose bound does not count."""


@dataclass(frozen=True, slots=True, eq=False)
class Overlap:
    """What of a problem's objective is compute, and how much can hide behind it.

    Attributes:
      problem: its objective adds up compute and collectives.
      compute: for every node, the seconds of each option that are compute.
      slack: which of the rest can be hidden.
      share: s above.
      hidable_share: as of `Device`.
      hidable: the part of the objective that is H.
    """

    problem: Problem
    compute: list[np.ndarray]
    slack: Slack
    share: float
    hidable_share: float
    hidable: Problem

    @classmethod
    def of(
        cls,
        problem: Problem,
        compute: list[np.ndarray],
        slack: Slack,
        *,
        share: float,
        hidable_share: float,
    ) -> Overlap:
        own = zip(problem.costs, compute, slack.nodes, strict=True)
        scaled = Scaled(hidable_share)
        edges = zip(problem.edges, slack.edges, strict=True)
        hidable = Problem(
            [hidable_share * has_slack * (total - c) for total, c, has_slack in own],
            [
                PairTable(e.source, e.target, scaled.table(e.table))
                for e, has_slack in edges
                if has_slack
            ],
        )
        return cls(problem, compute, slack, share, hidable_share, hidable)

    def slack_s(self, labels: Labels) -> float:
        """Seconds of collectives with slack, of which `hidable_share` can hide."""
        own = zip(self.problem.costs, self.compute, self.slack.nodes, strict=True)
        seconds = sum(
            float(total[label] - compute[label])
            for (total, compute, has_slack), label in zip(own, labels, strict=True)
            if has_slack
        )
        return seconds + sum(
            float(e.table[labels[e.source], labels[e.target]])
            for e, has_slack in zip(self.problem.edges, self.slack.edges, strict=True)
            if has_slack
        )

    @property
    def hides_nothing(self) -> bool:
        return self.share == 0 or self.hidable_share == 0

    def hidden_s(self, labels: Labels) -> float:
        """Seconds of collectives that hide behind compute."""
        if self.hides_nothing:
            return 0.0
        return min(self.hidable.objective(labels), self.share * self._c(labels))

    def step_s(self, labels: Labels) -> float:
        """T above."""
        return self.problem.objective(labels) - self.hidden_s(labels)

    def is_exposed(self, labels: Labels) -> bool:
        """Whether the budget is used up."""
        return self.hidable.objective(labels) >= self.share * self._c(labels)

    def _c(self, labels: Labels) -> float:
        return sum(float(c[labels[i]]) for i, c in enumerate(self.compute))

    def weighted(self, weight: float) -> Problem:
        """The problem whose objective is (1 - w·s)·C + A + w·H."""
        scaled = Scaled(1 - (1 - weight) * self.hidable_share)
        return replace(
            self.problem,
            costs=[
                total - weight * self.share * compute - (1 - weight) * hidden
                for total, compute, hidden in zip(
                    self.problem.costs, self.compute, self.hidable.costs, strict=True
                )
            ],
            edges=[
                PairTable(e.source, e.target, scaled.table(e.table)) if has_slack else e
                for e, has_slack in zip(
                    self.problem.edges, self.slack.edges, strict=True
                )
            ],
        )


def solve_overlapped(
    overlap: Overlap, starts: Sequence[Labels], effort: Effort, report: Report
) -> Solution:
    """Minimise T. The result is never worse than the best start that fits."""
    problem = overlap.problem
    if overlap.hides_nothing:
        return solve(problem, starts, effort, report)
    known = [s for s in starts if problem.peak(s) <= problem.limit]
    best = min(known, key=overlap.step_s, default=None)
    best_s = math.inf if best is None else overlap.step_s(best)
    low, high, bound = 0.0, 1.0, 0.0
    weight = 1.0 if best is None or overlap.is_exposed(best) else HIDDEN_WEIGHT
    tried: set[float] = set()
    starts = known if best is None else [best, *known]
    brief = replace(effort, near=max(effort.near, BRIEFLY_NEAR))
    while True:
        # At the weights between, the bound is not what counts.
        is_last = weight in (1.0, LEAST_WEIGHT)
        found = solve(overlap.weighted(weight), starts, effort if is_last else brief)
        bound = max(bound, found.bound)
        if found.labels is None:
            return found
        polished = _descend(overlap, found.labels)
        polished_s = overlap.step_s(polished)
        least = PREFERRED * bound if weight == LEAST_WEIGHT else 0.0
        if best_s - polished_s > least:
            best, best_s = polished, polished_s
        report(best_s, bound)
        if overlap.is_exposed(found.labels):
            low = weight
        else:
            high = weight
        tried.add(weight)
        if low == 1.0 or len(tried) >= effort.max_weights:
            break
        if time.monotonic() > effort.deadline or LEAST_WEIGHT in tried:
            break
        weight = _next_weight(low, high, tried)
        if weight == LEAST_WEIGHT and not effort.proves:
            break
        assert best is not None
        starts = [best, *known]
    assert best is not None
    return replace(
        found,
        labels=best,
        objective=best_s,
        bound=min(bound, best_s),
        peak=problem.peak(best),
    )


def _next_weight(low: float, high: float, tried: set[float]) -> float:
    """The weight to try next.

    Args:
      low: the largest at which something stays exposed, or 0.
      high: the smallest at which all is hidden, or 1.
      tried: all so far.
    """
    if high <= HIDDEN_WEIGHT:
        return LEAST_WEIGHT
    # Where something stays exposed, T itself may be what counts.
    ends = [w for w in (1.0, HIDDEN_WEIGHT) if w not in tried]
    return ends[0] if ends else (low + high) / 2


def _descend(overlap: Overlap, start: Labels, rounds: int = 4) -> Labels:
    """Move single nodes to the option with the smallest T, within the memory limit:
    between two weights lie choices that no weight makes best."""
    core, problem = adjacency(overlap.problem), overlap.problem
    hidden_core = adjacency(overlap.hidable)
    labels = np.array(start)
    total, hidden = problem.objective(labels), overlap.hidable.objective(labels)
    compute = sum(float(c[labels[i]]) for i, c in enumerate(overlap.compute))
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
            computes = compute + overlap.compute[i] - overlap.compute[i][labels[i]]
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
