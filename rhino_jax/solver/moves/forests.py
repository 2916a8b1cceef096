"""Forests of a core's nodes, and the best choice on one, by dynamic programming.

Nodes without children come first, then those whose children have all come, and so on:
what comes at a time is one level, and is worked out at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rhino_jax.solver.parameters import MOVES
from rhino_jax.utils.union_find import DisjointSets


class Tables(NamedTuple):
    """A core's tables in one array, both directions of every edge.

    Attributes:
      first: first option of every node, and the number of all options.
      keys: source · nodes + target of every edge, sorted.
      begins: where its table [source's options, target's options] begins in `cells`.
      cells: all tables.
    """

    first: np.ndarray
    keys: np.ndarray
    begins: np.ndarray
    cells: np.ndarray

    @classmethod
    def of(
        cls,
        first: np.ndarray,
        source: np.ndarray,
        target: np.ndarray,
        begins: np.ndarray,
        cells: np.ndarray,
    ) -> Tables:
        keys = source * (len(first) - 1) + target
        order = np.argsort(keys)
        return cls(first, keys[order], begins[order], cells)

    def find(self, source: np.ndarray, target: np.ndarray) -> np.ndarray:
        """Where the tables of edges begin."""
        keys = source * (len(self.first) - 1) + target
        return self.begins[np.searchsorted(self.keys, keys)]


class _Node(NamedTuple):
    """A node below its parent, by itself.

    Attributes:
      node, parent: their numbers.
      own, above: their options over all nodes.
      table: [parent's options, node's options].
    """

    node: int
    parent: int
    own: slice
    above: slice
    table: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class _Nodes:
    """Nodes below their parents, at once.

    Attributes:
      nodes, parents: their numbers.
      cells: their tables [parent's options, node's options].
      own: of every cell, the node's option over all nodes.
      rows: where the tables' rows begin.
      above: of every row, the parent's option over all nodes.
      begins, widths: of every table.
      options: [nodes, most options], options over all nodes; one more than there are
        where a node has fewer.
    """

    nodes: np.ndarray
    parents: np.ndarray
    cells: np.ndarray
    own: np.ndarray
    rows: np.ndarray
    above: np.ndarray
    begins: np.ndarray
    widths: np.ndarray
    options: np.ndarray

    def add_to_parents(self, costs: np.ndarray) -> None:
        """Add to the parents' options what each makes these nodes cost at least."""
        least = np.minimum.reduceat(self.cells + costs[self.own], self.rows)
        np.add.at(costs, self.above, least)

    def choose(self, costs: np.ndarray, labels: np.ndarray) -> None:
        """Set the nodes to what is best beside their parents."""
        rows = self.begins + labels[self.parents] * self.widths
        cells = rows[:, None] + np.arange(self.options.shape[1])
        paid = self.cells.take(cells, mode="clip") + costs[self.options]
        labels[self.nodes] = paid.argmin(axis=1)


@dataclass(frozen=True, slots=True, eq=False)
class Forest:
    """Nodes none of which closes a circle.

    Attributes:
      free: which nodes these are.
      first: first option of every node, and the number of all options.
      roots: those without a parent.
      levels: the others, each before its parent.
    """

    free: np.ndarray
    first: np.ndarray
    roots: list[int]
    levels: list[_Node | _Nodes]

    @classmethod
    def of(
        cls, near: Sequence[Sequence[int]], order: list[int], tables: Tables
    ) -> Forest:
        """As many nodes as may be, taken in the order given.

        Args:
          near: node → its neighbours.
          order: all nodes.
          tables: of the edges between them.
        """
        trees = DisjointSets(len(near))
        inside = [False] * len(near)
        # Of every node its neighbours inside, and all their numbers in one: who has
        # one neighbour left is told which.
        degree, others = [0] * len(near), [0] * len(near)
        for n in order:
            roots: list[int] = []
            mine: list[int] = []
            for j in near[n]:
                if not inside[j]:
                    continue
                mine.append(j)
                root = trees.find(j)
                if root in roots:
                    break
                roots.append(root)
            else:
                inside[n] = True
                degree[n] = len(mine)
                for j in mine:
                    trees.union(n, j)
                    degree[j] += 1
                    others[j] ^= n
                    others[n] ^= j
        free = np.array(inside, dtype=bool)
        is_root = list(inside)
        nodes: list[int] = []
        parents: list[int] = []
        sizes: list[int] = []
        ends = [n for n, count in enumerate(degree) if count == 1]
        while ends:
            following: list[int] = []
            before = len(nodes)
            for n in ends:
                # The last of a tree has no neighbour left.
                if not degree[n]:
                    continue
                parent = others[n]
                nodes.append(n)
                parents.append(parent)
                is_root[n] = False
                degree[n] = 0
                degree[parent] -= 1
                others[parent] ^= n
                if degree[parent] == 1:
                    following.append(parent)
            sizes.append(len(nodes) - before)
            ends = following
        levels = _levels(
            np.array(nodes, int), np.array(parents, int), np.array(sizes, int), tables
        )
        return cls(free, tables.first, np.flatnonzero(is_root).tolist(), levels)

    def best(self, costs: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """The choice that is best on the forest, the other nodes as they are.

        Args:
          costs: of every option beside the nodes outside.
          labels: the choice.
        """
        # Behind the last option: what nodes cannot choose.
        costs = np.append(costs, np.inf)
        for level in self.levels:
            if isinstance(level, _Nodes):
                level.add_to_parents(costs)
            else:
                _, _, own, above, table = level
                costs[above] += np.minimum.reduce(table + costs[own], axis=1)
        labels = labels.copy()
        for root in self.roots:
            labels[root] = costs[self.first[root] : self.first[root + 1]].argmin()
        for level in reversed(self.levels):
            if isinstance(level, _Nodes):
                level.choose(costs, labels)
            else:
                node, parent, own, _, table = level
                labels[node] = (table[labels[parent]] + costs[own]).argmin()
        return labels


def _levels(
    nodes: np.ndarray, parents: np.ndarray, sizes: np.ndarray, tables: Tables
) -> list[_Node | _Nodes]:
    """What is worked out one after the other.

    Args:
      nodes, parents: level after level.
      sizes: number of nodes of every level.
    """
    count = np.diff(tables.first)
    level = np.repeat(np.arange(len(sizes)), sizes)
    areas = count[nodes] * count[parents]
    order = np.argsort(areas)
    is_small = np.empty(len(areas), dtype=bool)
    is_small[order] = np.cumsum(areas[order]) <= MOVES.most_copied
    is_small &= areas <= MOVES.large_table
    num_small = np.bincount(level[is_small], minlength=len(sizes))
    is_small &= (num_small >= MOVES.few_nodes)[level]
    at_once: dict[int, list[_Node | _Nodes]] = {}
    for k, some in _at_once(
        nodes[is_small], parents[is_small], level[is_small], tables
    ):
        at_once[k] = [some]
    alone: list[list[_Node | _Nodes]] = [[] for _ in sizes]
    rest, above = nodes[~is_small], parents[~is_small]
    for k, node, parent, begin in zip(
        level[~is_small].tolist(),
        rest.tolist(),
        above.tolist(),
        tables.find(above, rest).tolist(),
        strict=True,
    ):
        own, its = (slice(*tables.first[i : i + 2].tolist()) for i in (node, parent))
        shape = its.stop - its.start, own.stop - own.start
        table = tables.cells[begin : begin + shape[0] * shape[1]].reshape(shape)
        alone[k].append(_Node(node, parent, own, its, table))
    return [x for k, some in enumerate(alone) for x in at_once.get(k, []) + some]


def _at_once(
    nodes: np.ndarray, parents: np.ndarray, level: np.ndarray, tables: Tables
) -> Iterator[tuple[int, _Nodes]]:
    """Levels, and their nodes.

    Args:
      level: of every node, rising.
    """
    if not len(nodes):
        return
    count, first = np.diff(tables.first), tables.first[nodes]
    heights, widths = count[parents], count[nodes]
    areas = heights * widths
    table = np.repeat(np.arange(len(nodes)), heights)
    row_widths = widths[table]
    row, cell = _begins(row_widths), _begins(areas)
    every = np.arange(areas.sum())
    cells = tables.cells[every + np.repeat(tables.find(parents, nodes) - cell, areas)]
    own = every + np.repeat(first[table] - row, row_widths)
    above = np.arange(len(table)) + (tables.first[parents] - _begins(heights))[table]
    # Where each level's nodes, rows and cells begin.
    starts = np.flatnonzero(np.diff(level, prepend=-1))
    ends = [*starts[1:].tolist(), len(nodes)]
    rows_before = np.append(_begins(heights), len(row)).tolist()
    cells_before = np.append(cell, len(cells)).tolist()
    for a, b in zip(starts.tolist(), ends, strict=True):
        rows = slice(rows_before[a], rows_before[b])
        area = slice(cells_before[a], cells_before[b])
        column = np.arange(widths[a:b].max())
        options = first[a:b, None] + column
        options[column >= widths[a:b, None]] = tables.first[-1]
        yield (
            int(level[a]),
            _Nodes(
                nodes[a:b],
                parents[a:b],
                cells[area],
                own[area],
                row[rows] - area.start,
                above[rows],
                cell[a:b] - area.start,
                widths[a:b],
                options,
            ),
        )


def _begins(lengths: np.ndarray) -> np.ndarray:
    return np.cumsum(lengths) - lengths
