"""Forests of a core's nodes, optimised by dynamic programming.

Nodes without children come first, then those all of whose children precede, and so on:
each such level is computed at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from rhino_jax.solver.parameters import MOVES
from rhino_jax.solver.reduction import unique_columns
from rhino_jax.utils.union_find import DisjointSets


class DistinctTable(NamedTuple):
    """A table without repeated rows and columns: many options of a node have the same
    sharding on an edge.

    Attributes:
      cells: [distinct rows, distinct columns].
      order, starts: the rows, equal ones adjacent, and where each distinct one starts.
      of_column: position of every column among the distinct ones.
    """

    cells: np.ndarray
    order: np.ndarray
    starts: np.ndarray
    of_column: np.ndarray

    @classmethod
    def of(cls, table: np.ndarray) -> DistinctTable:
        columns, of_column = unique_columns(table)
        rows, of_row = unique_columns(columns.T)
        order = np.argsort(of_row, kind="stable")
        starts = np.flatnonzero(np.diff(of_row[order], prepend=-1))
        return cls(np.ascontiguousarray(rows.T), order, starts, of_column)

    def least(self, costs: np.ndarray) -> np.ndarray:
        """Return by column the minimum over all rows of the table plus `costs`."""
        own = np.minimum.reduceat(costs[self.order], self.starts)
        return np.minimum.reduce(self.cells + own[:, None], axis=0)[self.of_column]


@dataclass(frozen=True, slots=True, eq=False)
class Tables:
    """A core's tables in one array, both directions of every edge.

    Attributes:
      first: first option of every node, and the number of all options.
      keys: source · nodes + target of every edge, sorted.
      begins: offset of its table [source's options, target's options] in `cells`.
      cells: entries of all tables.
    """

    first: np.ndarray
    keys: np.ndarray
    begins: np.ndarray
    cells: np.ndarray
    _distinct: dict[int, DistinctTable | None] = field(default_factory=dict)

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
        """Return the offsets of the tables of edges."""
        keys = source * (len(self.first) - 1) + target
        return self.begins[np.searchsorted(self.keys, keys)]

    def distinct(self, source: int, target: int) -> DistinctTable | None:
        """Return the table of an edge without repeated rows and columns; None where it
        is small, or has few of these."""
        count = np.diff(self.first[[source, source + 1, target, target + 1]])[::2]
        size = int(count.prod())
        if size < MOVES.distinct_cells:
            return None
        begin = int(self.find(np.array([source]), np.array([target]))[0])
        if begin not in self._distinct:
            found = DistinctTable.of(self.cells[begin : begin + size].reshape(count))
            is_smaller = MOVES.distinct_ratio * found.cells.size <= size
            self._distinct[begin] = found if is_smaller else None
        return self._distinct[begin]


class _Node(NamedTuple):
    """A single non-root node of a forest.

    Attributes:
      node, parent: positions of the node and its parent.
      own, above: ranges of the node's and the parent's options over all nodes.
      table: [parent's options, node's options].
      distinct: the table from the node to its parent, see `Tables.distinct`.
    """

    node: int
    parent: int
    own: slice
    above: slice
    table: np.ndarray
    distinct: DistinctTable | None


@dataclass(frozen=True, slots=True, eq=False)
class _Nodes:
    """Several non-root nodes of a forest, computed at once.

    Attributes:
      nodes, parents: positions of the nodes and their parents.
      cells: their tables, concatenated, [parent's options, node's options] each.
      own: by cell, the node's option over all nodes.
      rows: offsets of the tables' rows.
      above: by row, the parent's option over all nodes.
      begins, widths: offset and row length of every table.
      options: [nodes, largest number of options], options over all nodes; padded with
        the number of all options.
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
        """Add to the parents' options the minimum cost of these nodes given each."""
        least = np.minimum.reduceat(self.cells + costs[self.own], self.rows)
        np.add.at(costs, self.above, least)

    def choose(self, costs: np.ndarray, labels: np.ndarray) -> None:
        """Set the nodes to their best options, given their parents'."""
        rows = self.begins + labels[self.parents] * self.widths
        cells = rows[:, None] + np.arange(self.options.shape[1])
        paid = self.cells.take(cells, mode="clip") + costs[self.options]
        labels[self.nodes] = paid.argmin(axis=1)


@dataclass(frozen=True, slots=True, eq=False)
class Forest:
    """A set of nodes whose induced graph is acyclic.

    Attributes:
      free: boolean array of these nodes.
      first: first option of every node, and the number of all options.
      roots: nodes without a parent.
      levels: the other nodes, each before its parent.
    """

    free: np.ndarray
    first: np.ndarray
    roots: list[int]
    levels: list[_Node | _Nodes]

    @classmethod
    def of(
        cls, near: Sequence[Sequence[int]], order: list[int], tables: Tables
    ) -> Forest:
        """Build a maximal forest greedily, in the given order.

        Args:
          near: node → its neighbours.
          order: all nodes, in order of priority.
          tables: tables of the edges between them.
        """
        trees = DisjointSets(len(near))
        inside = [False] * len(near)
        # By node, the number of its neighbours inside, and the XOR of their numbers,
        # which is the neighbour itself once a single one is left.
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
                # The last node of a tree has no neighbour left: it is the root.
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
        """Return the assignment that is optimal on the forest, the other nodes fixed.

        Args:
          costs: cost of every option, including edges to nodes outside.
          labels: the assignment.
        """
        # An entry after the last option, for padding.
        costs = np.append(costs, np.inf)
        for level in self.levels:
            if isinstance(level, _Nodes):
                level.add_to_parents(costs)
            else:
                _, _, own, above, table, distinct = level
                if distinct is None:
                    costs[above] += np.minimum.reduce(table + costs[own], axis=1)
                else:
                    costs[above] += distinct.least(costs[own])
        labels = labels.copy()
        for root in self.roots:
            labels[root] = costs[self.first[root] : self.first[root + 1]].argmin()
        for level in reversed(self.levels):
            if isinstance(level, _Nodes):
                level.choose(costs, labels)
            else:
                node, parent, own, _, table, _ = level
                labels[node] = (table[labels[parent]] + costs[own]).argmin()
        return labels


def _levels(
    nodes: np.ndarray, parents: np.ndarray, sizes: np.ndarray, tables: Tables
) -> list[_Node | _Nodes]:
    """Return the levels as steps, computed one after the other.

    Args:
      nodes, parents: nodes and their parents, level after level.
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
        distinct = tables.distinct(node, parent)
        alone[k].append(_Node(node, parent, own, its, table, distinct))
    return [x for k, some in enumerate(alone) for x in at_once.get(k, []) + some]


def _at_once(
    nodes: np.ndarray, parents: np.ndarray, level: np.ndarray, tables: Tables
) -> Iterator[tuple[int, _Nodes]]:
    """Yield each level with its nodes that are computed at once.

    Args:
      level: level of every node, ascending.
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
