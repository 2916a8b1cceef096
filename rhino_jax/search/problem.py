"""The search's core problem: nodes that choose, edges that charge for pairs.

    minimise   Σ_i cost_i[x_i] + Σ_(i,j) table_ij[x_i, x_j]
    such that  Σ (usages live at t) ≤ limit   at every time t

It is the problem of XLA's auto-sharding and of the ASPLOS/EuroSys 2025 contest on
intra-operator parallelism, with usages on edges too (resharded copies need memory).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np


Labels = np.ndarray
"""One option per node, int64."""


@dataclass(frozen=True, slots=True, eq=False)
class PairTable:
    """Costs of an edge: `table[x_source, x_target]`, in the objective's unit."""

    source: int
    target: int
    table: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class NodeUsage:
    """Memory that a node's choice holds from `start` up to, not including, `stop`."""

    node: int
    usage: np.ndarray
    start: int
    stop: int


@dataclass(frozen=True, slots=True, eq=False)
class EdgeUsage:
    """Memory that a pair of choices holds, likewise."""

    source: int
    target: int
    usage: np.ndarray
    start: int
    stop: int


@dataclass(slots=True, eq=False)
class Problem:
    """A whole problem.

    Attributes:
      costs: for every node, the cost of each option.
      edges: pair costs; several edges may join the same two nodes.
      node_usages, edge_usages: memory.
      limit: memory limit, or infinity.
      end: all times are below it.
    """

    costs: list[np.ndarray]
    edges: list[PairTable]
    node_usages: list[NodeUsage] = field(default_factory=list)
    edge_usages: list[EdgeUsage] = field(default_factory=list)
    limit: float = float("inf")
    end: int = 1

    def objective(self, labels: Sequence[int] | Labels) -> float:
        """Cost of a choice, recomputed from the tables."""
        total = sum(float(c[labels[i]]) for i, c in enumerate(self.costs))
        total += sum(
            float(e.table[labels[e.source], labels[e.target]]) for e in self.edges
        )
        return total

    def profile(self, labels: Sequence[int] | Labels) -> np.ndarray:
        """Memory at every time."""
        change = np.zeros(self.end + 1)
        for u in self.node_usages:
            amount = u.usage[labels[u.node]]
            change[u.start] += amount
            change[u.stop] -= amount
        for e in self.edge_usages:
            amount = e.usage[labels[e.source], labels[e.target]]
            if amount:
                change[e.start] += amount
                change[e.stop] -= amount
        return np.cumsum(change)[: self.end]

    def peak(self, labels: Sequence[int] | Labels) -> float:
        """Largest memory over time."""
        return float(self.profile(labels).max(initial=0.0))

    def restricted(self, allowed: Sequence[np.ndarray]) -> Problem:
        """The problem in which every node keeps only the `allowed` options."""
        cache: dict[tuple[int, int, int], np.ndarray] = {}

        def part(table: np.ndarray, i: int, j: int) -> np.ndarray:
            key = (id(table), id(allowed[i]), id(allowed[j]))
            found = cache.get(key)
            if found is None:
                found = cache[key] = table[np.ix_(allowed[i], allowed[j])]
            return found

        return Problem(
            [c[a] for c, a in zip(self.costs, allowed, strict=True)],
            [
                PairTable(e.source, e.target, part(e.table, e.source, e.target))
                for e in self.edges
            ],
            [
                NodeUsage(u.node, u.usage[allowed[u.node]], u.start, u.stop)
                for u in self.node_usages
            ],
            [
                EdgeUsage(
                    u.source,
                    u.target,
                    part(u.usage, u.source, u.target),
                    u.start,
                    u.stop,
                )
                for u in self.edge_usages
            ],
            self.limit,
            self.end,
        )

    def priced(self, prices: dict[int, float]) -> Problem:
        """Memory at the given times charged at a price: a Lagrangian relaxation.

        Args:
          prices: time → cost per unit of memory live then, ≥ 0.
        """
        times = np.array(sorted(prices))
        cumulative = np.concatenate([[0.0], np.cumsum([prices[t] for t in times])])

        def price(start: int, stop: int) -> float:
            low, high = np.searchsorted(times, [start, stop])
            return float(cumulative[high] - cumulative[low])

        costs = list(self.costs)
        for u in self.node_usages:
            rate = price(u.start, u.stop)
            if rate:
                costs[u.node] = costs[u.node] + rate * u.usage
        edges = list(self.edges)
        for e in self.edge_usages:
            rate = price(e.start, e.stop)
            if rate:
                edges.append(PairTable(e.source, e.target, rate * e.usage))
        return Problem(costs, edges)
