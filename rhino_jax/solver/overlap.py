"""Overlap of collectives with compute: compute provides a budget once.

With C seconds of compute, H of collectives that can be hidden, A of all others, and a
share s of compute behind which they can hide, a step takes

    T = C + A + max(0, H - s·C) = max over w in [0, 1] of (1 - w·s)·C + A + w·H.

For a fixed w the right side is an ordinary problem, whose bound is a bound on T. At
w = 1 it is T itself if communication is exposed; if all is hidden, smaller weights
trade collectives for compute, and `descend` finds assignments that are optimal at none.

A share of collectives with slack (the ops that wait for them leave time) can be hidden,
and a larger share of those that are free up to one of the step's ends: compilers start
only some collectives early, and concurrent collectives take memory bandwidth and cores
from compute.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from rhino_jax.solver.parameters import MOVES
from rhino_jax.solver.problem import Labels, PairTable, Problem
from rhino_jax.utils.cache import Memo
from rhino_jax.utils.union_find import for_each, number, number_objects, number_rows


class Wait(enum.IntEnum):
    """The first op that waits for a collective."""

    NONE = 0
    """The next matmul: it has no slack."""
    BACK = 1
    """The end of the step: an updated value is resharded before it is fed back."""
    UPDATE = 2
    """Its own update, concurrent with other updates: the last gradients."""
    LATER = 3
    """A later matmul."""
    FREE = 4
    """None: it can run from the step's start on, or until the step's end."""


@dataclass(frozen=True, slots=True)
class Slack:
    """Slack of all collectives of a problem.

    Attributes:
      nodes: by node, the `Wait` of the collectives after its compute.
      edges: by edge, the `Wait` of its reshard.
    """

    nodes: tuple[int, ...]
    edges: tuple[int, ...]

    def where(self, hides_in_updates: bool) -> Slack:
        """Return the slack in terms of NONE, BACK, LATER and FREE alone.

        Args:
          hides_in_updates: whether collectives can overlap with updates.
        """
        kinds = {w: w for w in Wait}
        kinds[Wait.BACK] = Wait.BACK if hides_in_updates else Wait.NONE
        kinds[Wait.UPDATE] = Wait.FREE if hides_in_updates else Wait.NONE
        table = [int(kinds[w]) for w in Wait]
        return Slack(
            tuple([table[w] for w in self.nodes]),
            tuple([table[w] for w in self.edges]),
        )


Shares = Mapping[int, float]
"""`Wait` of a collective → share of it that can be hidden."""

NOTHING_HIDES: Shares = {Wait.BACK: 0.0, Wait.LATER: 0.0, Wait.FREE: 0.0}


@dataclass(frozen=True, slots=True, eq=False)
class Overlap:
    """A problem whose collectives can hide behind compute.

    Attributes:
      problem: the problem; its objective sums compute and collectives.
      compute: the part of the objective that is C.
      slack: `Wait` of the collectives of every node and edge.
      share: share of compute that can hide collectives, s.
      shares: share of a collective that can be hidden, by its `Wait`.
      hidable: the part of the objective that is H.
    """

    problem: Problem
    compute: Problem
    slack: Slack
    share: float
    shares: Shares
    hidable: Problem

    @classmethod
    def of(
        cls,
        problem: Problem,
        compute: list[np.ndarray],
        slack: Slack,
        *,
        share: float,
        shares: Shares,
    ) -> Overlap:
        """Build the problem; `compute` has the compute seconds of nodes' options."""
        costs = problem.costs
        edges = list(itertools.compress(problem.edges, slack.edges))
        of_edges = [shares[wait] for wait in slack.edges if wait]

        def hidable_s(node: int) -> np.ndarray:
            wait = slack.nodes[node]
            if not wait:
                return np.zeros(len(costs[node]))
            return shares[wait] * (costs[node] - compute[node])

        nodes = number_rows(
            number_objects(costs),
            number_objects(compute),
            np.array(slack.nodes, dtype=np.int64),
        )
        tables = for_each(
            number_rows(
                number_objects([e.table for e in edges]),
                number(of_edges),
            ),
            lambda k: of_edges[k] * edges[k].table,
        )
        pairs = zip(edges, tables, strict=True)
        hidable = Problem(
            for_each(nodes, hidable_s),
            [PairTable(e.source, e.target, table) for e, table in pairs],
        )
        return cls(problem, Problem(compute, []), slack, share, shares, hidable)

    @classmethod
    def none(cls, problem: Problem) -> Overlap:
        """Return a problem without overlap: T is its objective."""
        nothing = Problem([np.zeros(len(c)) for c in problem.costs], [])
        slack = Slack((0,) * len(problem.costs), (0,) * len(problem.edges))
        return cls(problem, nothing, slack, 0.0, NOTHING_HIDES, nothing)

    def slack_s(self, labels: Labels) -> float:
        """Return the seconds of collectives with slack, some of which can be hidden."""
        first, *others = self.shares.values()
        if first and all(share == first for share in others):
            return self.hidable.objective(labels) / first
        costs, compute = self.problem.costs, self.compute.costs
        own = zip(costs, compute, self.slack.nodes, strict=True)
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
        return self.share == 0 or not any(self.shares.values())

    def hidden_s(self, labels: Labels) -> float:
        """Return the seconds of collectives that hide behind compute."""
        if self.hides_nothing:
            return 0.0
        return min(
            self.hidable.objective(labels), self.share * self.compute.objective(labels)
        )

    def step_s(self, labels: Labels) -> float:
        """Return T."""
        return self.problem.objective(labels) - self.hidden_s(labels)

    def ends_s(self, labels: Labels) -> tuple[float, float]:
        """Return the pair whose maximum is T: C + A, and (1 - s)·C + A + H.

        The first is T if all hidable collectives are hidden.
        """
        hidable, total = self.hidable.objective(labels), self.problem.objective(labels)
        return total - hidable, total - self.share * self.compute.objective(labels)

    def is_exposed(self, labels: Labels) -> bool:
        """Whether hidable collectives use up the compute budget."""
        return self.hidable.objective(labels) >= self.share * self.compute.objective(
            labels
        )

    def weighted(self, weight: float) -> Problem:
        """Return the problem with the objective (1 - w·s)·C + A + w·H."""
        if self.hides_nothing:
            return self.problem
        memo = Memo()
        rest = {w: 1 - (1 - weight) * share for w, share in self.shares.items()}

        def exposed(
            total: np.ndarray, compute: np.ndarray, hidden: np.ndarray
        ) -> np.ndarray:
            return total - weight * self.share * compute - (1 - weight) * hidden

        parts = self.problem.costs, self.compute.costs, self.hidable.costs
        return self.problem.recharged(
            [memo.make(exposed, *each) for each in zip(*parts, strict=True)],
            [
                PairTable(e.source, e.target, memo.scaled(e.table, rest[wait]))
                if wait
                else e
                for e, wait in zip(self.problem.edges, self.slack.edges, strict=True)
            ],
        )


def descend(overlap: Overlap, start: Labels) -> Labels:
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

    for _ in range(MOVES.most_passes):
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
