"""Costs of a core's assignments, and moves that improve them.

A move sets all nodes of a forest to their optimal options given the others, by dynamic
programming from the leaves. Forests are random; a dozen are built, and then used in
turn.

Source: Fix, Chen, Boros, Zabih, "Approximate MRF inference using bounded treewidth
subgraphs", ECCV 2012, of which trees are the simplest case.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from rhino_jax.solver.lookups import Beside, Lookups
from rhino_jax.solver.memory import Memory
from rhino_jax.solver.moves.forests import Forest, Tables
from rhino_jax.solver.parameters import MOVES
from rhino_jax.solver.reduction import Core
from rhino_jax.utils.union_find import number_objects


@dataclass(slots=True, eq=False)
class Moves:
    """Costs and tables of a core in flat arrays; options are numbered as in `Memory`.

    Attributes:
      memory: memory of the core; its `first` numbers the options.
      costs: cost of every option.
      neighbours: node → (neighbour, table) pairs.
      forbidden: stand-in for an infinite cost: larger than the cost of any assignment.
      tables: the tables of `neighbours`, by edge.
    """

    memory: Memory
    costs: np.ndarray
    neighbours: list[list[tuple[int, np.ndarray]]]
    forbidden: float
    _cells: np.ndarray
    _pairs: Lookups
    tables: Tables
    _near: list[list[int]]
    _made: list[Forest] = field(default_factory=list)
    _again: Iterator[Forest] | None = None
    _beside: Beside | None = None

    @classmethod
    def of(cls, core: Core, memory: Memory) -> Moves:
        place = {node: n for n, node in enumerate(core.costs)}
        costs = np.concatenate([*core.costs.values(), np.zeros(0)])
        edges = [
            (place[i], place[j], table)
            for i, near in core.tables.items()
            for j, table in near.items()
        ]
        source = np.array([i for i, _, _ in edges], dtype=int)
        target = np.array([j for _, j, _ in edges], dtype=int)
        widths = np.array([t.shape[1] for *_, t in edges], dtype=int)
        # Equivalent nodes share their tables: each is stored once.
        which = number_objects([t for *_, t in edges])
        once = list({id(t): t for *_, t in edges}.values())
        ends = np.cumsum([0, *(t.size for t in once)])
        begins = ends[:-1][which]
        cells = np.concatenate([*(t.ravel() for t in once), np.zeros(0)])
        both_ways = float(_largest(cells, ends[:-1])[which].sum())
        largest = float(_largest(costs, memory.first[:-1]).sum())
        forbidden = 2 * largest + both_ways + 1
        infinite = ~np.isfinite(cells)
        if infinite.any():
            cells[infinite] = forbidden
        neighbours: list[list[tuple[int, np.ndarray]]] = [[] for _ in place]
        for (i, j, table), begin in zip(edges, begins.tolist(), strict=True):
            part = cells[begin : begin + table.size]
            neighbours[i].append((j, part.reshape(table.shape)))
        forward = source < target
        pairs = Lookups(
            source[forward],
            target[forward],
            begins[forward],
            widths[forward],
            cells,
        )
        return cls(
            memory,
            costs,
            neighbours,
            forbidden,
            cells,
            pairs,
            Tables.of(memory.first, source, target, begins, cells),
            [[j for j, _ in around] for around in neighbours],
        )

    def unit(self, known: float) -> float:
        """Return the unit of cost in which a known assignment costs `MOVES.units`.

        The unit is larger if other assignments' costs would not fit into 64 bits.

        Args:
          known: cost of the known assignment.
        """
        dearest = self.forbidden - 1  # at least what any choice costs
        return max(known / MOVES.units, dearest / MOVES.most_units, 1e-39)

    def divide(self, unit: float) -> None:
        """Divide all costs by a unit. No forest may have been built."""
        assert not self._made
        # In place: neighbours' tables are parts of the cells.
        self.costs /= unit
        self._cells /= unit
        self.forbidden /= unit

    def objective(self, labels: np.ndarray) -> float:
        """Return the cost of an assignment; forbidden entries count `forbidden`."""
        nodes = self.costs[self.memory.first[:-1] + labels].sum()
        return float(nodes + self._pairs.entries(labels).sum())

    def totals(
        self, costs: np.ndarray, labels: np.ndarray, free: np.ndarray | None = None
    ) -> np.ndarray:
        """Return the cost of every option, given the neighbours' options.

        Args:
          costs: cost of every option alone.
          labels: the assignment.
          free: boolean array of nodes whose edges do not count; None: none.
        """
        if self._beside is None:  # built on first use
            self._beside = Beside.of(self._pairs, np.diff(self.memory.first))
        return costs + self._beside.pairs(labels, free=free)

    def forest_move(
        self, costs: np.ndarray, labels: np.ndarray, rng: np.random.Generator
    ) -> np.ndarray:
        """Return the assignment that is optimal on the next forest, others fixed.

        Args:
          costs: cost of every option alone.
          labels: the assignment.
          rng: generator for new forests, up to `most_forests`.
        """
        forest = self._next_forest(rng)
        return forest.best(self.totals(costs, labels, forest.free), labels)

    def _next_forest(self, rng: np.random.Generator) -> Forest:
        if self._again is None:
            order = rng.permutation(len(self._near)).tolist()
            self._made.append(Forest.of(self._near, order, self.tables))
            if len(self._made) == MOVES.most_forests:
                self._again = itertools.cycle(self._made)
            return self._made[-1]
        return next(self._again)


def _largest(costs: np.ndarray, begins: np.ndarray) -> np.ndarray:
    """Return the largest finite absolute cost of every part."""
    if not len(begins):
        return np.zeros(0)
    found = np.maximum.reduceat(costs, begins), -np.minimum.reduceat(costs, begins)
    largest = np.maximum(*found)
    # Copies of all costs take most of the memory of planning, and mostly all are
    # finite.
    if not np.isfinite(largest).all():
        finite = np.where(np.isfinite(costs), np.abs(costs), 0.0)
        largest = np.maximum.reduceat(finite, begins)
    return largest
