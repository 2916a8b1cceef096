"""The search's core problem: nodes that choose, edges that charge for pairs.

    minimise   Σ_i cost_i[x_i] + Σ_(i,j) table_ij[x_i, x_j]
    such that  Σ (usages live at t) ≤ limit   at every time t

It is the problem of XLA's auto-sharding and of the ASPLOS/EuroSys 2025 contest on
intra-operator parallelism, with usages on edges too (resharded copies need memory).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from rhino_jax.optimize.lookups import Beside, Lookups, Spans
from rhino_jax.optimize.restriction import Restriction


Labels = np.ndarray
"""One option per node, int64."""


class PairTable(NamedTuple):
    """Costs of an edge: `table[x_source, x_target]`, in the objective's unit."""

    source: int
    target: int
    table: np.ndarray


class NodeUsage(NamedTuple):
    """Memory that a node's choice holds from `start` up to, not including, `stop`."""

    node: int
    usage: np.ndarray
    start: int
    stop: int


class EdgeUsage(NamedTuple):
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

    What is added after the first `objective` or `profile` is not seen; to one made by
    `restricted`, whose objective is the whole problem's, nothing is.
    """

    costs: list[np.ndarray]
    edges: list[PairTable]
    node_usages: list[NodeUsage] = field(default_factory=list)
    edge_usages: list[EdgeUsage] = field(default_factory=list)
    limit: float = float("inf")
    end: int = 1
    _prices: tuple[Lookups, Lookups] | None = field(init=False, default=None)
    _held: tuple[Spans, Spans] | None = field(init=False, default=None)
    _part_of: tuple[Problem, Restriction] | None = field(init=False, default=None)

    def objective(self, labels: Sequence[int] | Labels) -> float:
        """Cost of a choice, recomputed from the tables."""
        labels = np.asarray(labels, dtype=np.int64)
        if self._part_of is not None:
            whole, left = self._part_of
            return whole.objective(left.expand(labels))
        return float(sum(x.entries(labels).sum() for x in self._lookups()))

    def _lookups(self) -> tuple[Lookups, Lookups]:
        """Costs of nodes and of edges."""
        if self._prices is None:
            nodes = range(len(self.costs))
            self._prices = (
                Lookups.of(nodes, nodes, self.costs),
                Lookups.of(*_columns(self.edges)),
            )
        return self._prices

    def beside(self) -> Beside:
        """What every option costs beside the other nodes' choices."""
        sizes = np.array([len(c) for c in self.costs], dtype=np.int64)
        return Beside.of(*self._lookups(), sizes)

    def profile(self, labels: Sequence[int] | Labels) -> np.ndarray:
        """Memory at every time."""
        labels = np.asarray(labels, dtype=np.int64)
        return sum(
            (spans.profile(labels, self.end) for spans in self._spans()),
            np.zeros(self.end),
        )

    def _spans(self) -> tuple[Spans, Spans]:
        """Memory of nodes and of edges."""
        if self._held is None:
            self._held = _spans(self.node_usages), _spans(self.edge_usages)
        return self._held

    def peak(self, labels: Sequence[int] | Labels) -> float:
        """Largest memory over time."""
        return float(self.profile(labels).max(initial=0.0))

    def peak_time(self, labels: Sequence[int] | Labels) -> int:
        """The first time of largest memory."""
        return int(self.profile(labels).argmax())

    def restricted(self, left: Restriction) -> Problem:
        """The problem in which every node keeps only the options that are left."""
        allowed = left.allowed
        cache: dict[tuple[int, ...], np.ndarray] = {}

        def part(table: np.ndarray, *nodes: int) -> np.ndarray:
            key = (id(table), *[id(allowed[i]) for i in nodes])
            found = cache.get(key)
            if found is None:
                found = table[allowed[nodes[0]]]
                for i in nodes[1:]:
                    found = found[:, allowed[i]]
                cache[key] = found
            return found

        small = Problem(
            [part(cost, i) for i, cost in enumerate(self.costs)],
            [
                PairTable(e.source, e.target, part(e.table, e.source, e.target))
                for e in self.edges
            ],
            [
                NodeUsage(u.node, part(u.usage, u.node), u.start, u.stop)
                for u in self.node_usages
            ],
            [
                EdgeUsage(u.source, u.target, part(u.usage, *_ends(u)), u.start, u.stop)
                for u in self.edge_usages
            ],
            self.limit,
            self.end,
        )
        small._part_of = self, left
        return small

    def recharged(self, costs: list[np.ndarray], edges: list[PairTable]) -> Problem:
        """The problem with the same memory and other costs."""
        other = replace(self, costs=costs, edges=edges)
        other._held = self._spans()
        return other

    def priced(self, prices: Mapping[int, float]) -> Problem:
        """Memory at the given times charged at a price: a Lagrangian relaxation.

        Args:
          prices: time → cost per unit of memory live then, ≥ 0.
        """
        of_nodes, of_edges = (spans.rates(prices) for spans in self._spans())
        costs = list(self.costs)
        for node, rate, usage in _sum_alike(self.node_usages, of_nodes):
            costs[node[0]] = costs[node[0]] + rate * usage
        edges = [
            *self.edges,
            *(
                PairTable(ends[0], ends[-1], rate * usage)
                for ends, rate, usage in _sum_alike(self.edge_usages, of_edges)
            ),
        ]
        return Problem(costs, edges)


def _columns(
    tables: Sequence[PairTable],
) -> tuple[list[int], list[int], list[np.ndarray]]:
    return (
        [e.source for e in tables],
        [e.target for e in tables],
        [e.table for e in tables],
    )


def _spans(usages: Sequence[NodeUsage] | Sequence[EdgeUsage]) -> Spans:
    ends = [_ends(u) for u in usages]
    return Spans(
        Lookups.of(
            [e[0] for e in ends], [e[-1] for e in ends], [u.usage for u in usages]
        ),
        np.array([u.start for u in usages], dtype=np.int64),
        np.array([u.stop for u in usages], dtype=np.int64),
    )


def _ends(usage: NodeUsage | EdgeUsage) -> tuple[int, ...]:
    if isinstance(usage, NodeUsage):
        return (usage.node,)
    return usage.source, usage.target


def _sum_alike(
    usages: Sequence[NodeUsage] | Sequence[EdgeUsage], rates: np.ndarray
) -> list[tuple[tuple[int, ...], float, np.ndarray]]:
    """Nodes, the sum of rates, and usage, where they are the same usage."""
    found: dict[tuple[object, ...], tuple[tuple[int, ...], float, np.ndarray]] = {}
    for k in np.flatnonzero(rates).tolist():
        usage, ends = usages[k].usage, _ends(usages[k])
        _, rate, _ = found.get((ends, id(usage)), (ends, 0.0, usage))
        found[ends, id(usage)] = ends, rate + float(rates[k]), usage
    return list(found.values())
