"""Choices of a network: what they cost, and moves that make them better.

A move takes nodes that form a forest and sets all of them at once to their best
options beside the others, by dynamic programming from the leaves.

Source: Fix, Chen, Boros, Zabih, "Approximate MRF inference using bounded treewidth
subgraphs", ECCV 2012, of which trees are the simplest case.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rhino_jax.solver.memory import Memory
from rhino_jax.solver.network import Network


@dataclass(slots=True, eq=False)
class Moves:
    """Costs and tables of a network in flat arrays; options as of `Memory`.

    Attributes:
      memory: of the network; its `first` numbers the options.
      costs: of every option.
      source, target: nodes of every edge, both directions.
      neighbours: node → (neighbour, table) pairs.
      forbidden: stands in for an infinite cost: more than any choice costs.
    """

    memory: Memory
    costs: np.ndarray
    source: np.ndarray
    target: np.ndarray
    neighbours: list[list[tuple[int, np.ndarray]]]
    forbidden: float
    _cells: np.ndarray
    _rows: np.ndarray
    _edges: np.ndarray
    _columns: np.ndarray
    _starts: np.ndarray

    @classmethod
    def of(cls, network: Network, memory: Memory) -> Moves:
        place = {node: n for n, node in enumerate(network.costs)}
        costs = np.concatenate([*network.costs.values(), np.zeros(0)])
        largest = sum(_largest(c) for c in network.costs.values()) + sum(
            _largest(t) / 2 for near in network.tables.values() for t in near.values()
        )
        forbidden = 2 * largest + 1
        edges = [
            (place[i], place[j], np.where(np.isfinite(t), t, forbidden))
            for i, near in network.tables.items()
            for j, t in near.items()
        ]
        neighbours: list[list[tuple[int, np.ndarray]]] = [[] for _ in place]
        for i, j, table in edges:
            neighbours[i].append((j, table))
        source = np.array([i for i, _, _ in edges], dtype=int)
        target = np.array([j for _, j, _ in edges], dtype=int)
        heights = np.array([t.shape[0] for *_, t in edges], dtype=int)
        widths = np.array([t.shape[1] for *_, t in edges], dtype=int)
        begins = np.concatenate([[0], np.cumsum(heights * widths)]).astype(int)
        of_edge = np.repeat(np.arange(len(edges)), heights)
        starts = np.concatenate([[0], np.cumsum(heights)]).astype(int)
        option = np.arange(starts[-1]) - starts[of_edge]
        return cls(
            memory,
            costs,
            source,
            target,
            neighbours,
            forbidden,
            np.concatenate([*(t.ravel() for *_, t in edges), np.zeros(0)]),
            begins[of_edge] + option * widths[of_edge],
            of_edge,
            memory.first[source][of_edge] + option,
            starts[:-1],
        )

    def objective(self, labels: np.ndarray) -> float:
        """Costs of nodes and edges; what is forbidden counts `forbidden`."""
        nodes = self.costs[self.memory.first[:-1] + labels].sum()
        rows = self._rows[self._starts + labels[self.source]]
        return float(nodes + self._cells[rows + labels[self.target]].sum() / 2)

    def totals(
        self, costs: np.ndarray, labels: np.ndarray, free: np.ndarray | None = None
    ) -> np.ndarray:
        """Cost of every option beside the neighbours' choices.

        Args:
          costs: of every option by itself.
          labels: the choice.
          free: nodes whose choices do not count, or None.
        """
        paid = self._cells[self._rows + labels[self.target][self._edges]]
        if free is not None:
            paid = np.where(free[self.target][self._edges], 0.0, paid)
        return costs + np.bincount(self._columns, paid, len(costs))

    def forest_move(
        self, costs: np.ndarray, labels: np.ndarray, rng: np.random.Generator
    ) -> np.ndarray:
        """The best choice on a random forest, the other nodes as they are."""
        order, parents = self._forest(rng)
        free = np.zeros(len(labels), dtype=bool)
        free[order] = True
        totals = self.totals(costs, labels, free)
        first = self.memory.first
        below = {n: totals[first[n] : first[n + 1]] for n in order}
        tables: dict[int, np.ndarray] = {}
        for n in reversed(order):
            if (up := parents[n]) is not None:
                parent, table = up
                tables[n] = reach = table + below[n]
                below[parent] = below[parent] + np.minimum.reduce(reach, axis=1)
        moved = labels.copy()
        for n in order:
            up = parents[n]
            moved[n] = (below[n] if up is None else tables[n][moved[up[0]]]).argmin()
        return moved

    def _forest(
        self, rng: np.random.Generator
    ) -> tuple[list[int], dict[int, tuple[int, np.ndarray] | None]]:
        """Nodes that form a forest, each after its parent; and the parents, with the
        table from the parent's options to the node's."""
        # Disjoint sets, with path halving: this is where moves spend their time.
        up = list(range(len(self.neighbours)))
        inside = [False] * len(up)
        for n in rng.permutation(len(up)).tolist():
            roots: list[int] = []
            for j, _ in self.neighbours[n]:
                if not inside[j]:
                    continue
                while up[j] != j:
                    up[j] = j = up[up[j]]
                if j in roots:
                    break
                roots.append(j)
            else:
                inside[n] = True
                for root in roots:
                    up[root] = n
        order: list[int] = []
        parents: dict[int, tuple[int, np.ndarray] | None] = {}
        for root in np.flatnonzero(inside).tolist():
            if root in parents:
                continue
            parents[root] = None
            todo = [root]
            while todo:
                n = todo.pop()
                order.append(n)
                for j, table in self.neighbours[n]:
                    if inside[j] and j not in parents:
                        parents[j] = n, table
                        todo.append(j)
        return order, parents


def _largest(costs: np.ndarray) -> float:
    finite = costs[np.isfinite(costs)]
    return float(np.abs(finite).max(initial=0.0))
