"""Costs and memory of a problem in flat arrays: assignments are summed by indexing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class Lookups:
    """Several tables, each indexed by the options of one node or of two.

    Tables that are the same array are stored once.

    Attributes:
      source, target: nodes whose options index row and column.
      begin, width: offset and row length of each table in `cells`.
      cells: entries of all tables.
    """

    source: np.ndarray
    target: np.ndarray
    begin: np.ndarray
    width: np.ndarray
    cells: np.ndarray

    @classmethod
    def of(
        cls,
        sources: Sequence[int],
        targets: Sequence[int],
        tables: Sequence[np.ndarray],
    ) -> Lookups:
        """Build lookups from tables [source's options, target's options].

        Vectors are indexed by a single node, given as both source and target.
        """
        ids = np.fromiter(map(id, tables), dtype=np.int64, count=len(tables))
        _, first, which = np.unique(ids, return_index=True, return_inverse=True)
        kept = [tables[k] for k in first.tolist()]
        sizes = np.array([t.size for t in kept], dtype=np.int64)
        # A vector is a row of width 0, indexed by its column.
        widths = [t.shape[1] if t.ndim == 2 else 0 for t in kept]
        return cls(
            np.array(sources, dtype=np.int64),
            np.array(targets, dtype=np.int64),
            (np.cumsum(sizes) - sizes)[which],
            np.array(widths, dtype=np.int64)[which],
            np.concatenate([*(t.ravel() for t in kept), np.zeros(0)]),
        )

    def entries(
        self, labels: np.ndarray, some: Sequence[int] | slice = slice(None)
    ) -> np.ndarray:
        """Return the entry of every table, or of some, under an assignment."""
        rows = self.begin[some] + labels[self.source[some]] * self.width[some]
        return self.cells[rows + labels[self.target[some]]]


@dataclass(frozen=True, slots=True, eq=False)
class Beside:
    """Sums of table entries per option, given the options of the other nodes.

    Every table of two nodes counts at both ends, grouped by node; an end has an entry
    for every option of its node.

    Attributes:
      first: first option of every node among all, and the number of all.
      cells: entries of the tables.
      own_cell, own_option, own_table: for every entry of a table of one node, its cell,
        its option among all, and its table.
      other, stride, table: for every end, the node at the other end, the stride of that
        node's options in the table, and the table.
      ends, entries: first end, and first entry, of every node, and their numbers.
      begin: for every entry, its cell if the other node takes its first option.
      end, option: for every entry, its end, and its option among all.
    """

    first: np.ndarray
    cells: np.ndarray
    own_cell: np.ndarray
    own_option: np.ndarray
    own_table: np.ndarray
    other: np.ndarray
    stride: np.ndarray
    table: np.ndarray
    ends: np.ndarray
    entries: np.ndarray
    begin: np.ndarray
    end: np.ndarray
    option: np.ndarray

    @classmethod
    def of(cls, tables: Lookups, sizes: np.ndarray) -> Beside:
        """Build the index arrays.

        Args:
          tables: tables of one node, of two, or of one with itself.
          sizes: number of options of every node.
        """
        first = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        single = np.flatnonzero(tables.source == tables.target)
        node = tables.source[single]
        counts = sizes[node]
        own_table = np.repeat(single, counts)
        at = np.arange(len(own_table)) - np.repeat(np.cumsum(counts) - counts, counts)
        # A table of a node with itself contributes its diagonal.
        own_cell = tables.begin[own_table] + at * (tables.width[own_table] + 1)
        own_option = np.repeat(first[node], counts) + at
        pairs = np.flatnonzero(tables.source != tables.target)
        source, target, begin, width = (
            x[pairs] for x in (tables.source, tables.target, tables.begin, tables.width)
        )
        node, one = np.concatenate([source, target]), np.ones_like(width)
        order = np.argsort(node, kind="stable")
        node = node[order]
        counts = sizes[node]
        end = np.repeat(np.arange(len(node)), counts)
        at = np.arange(len(end)) - (np.cumsum(counts) - counts)[end]
        step = np.concatenate([width, one])[order]
        ends = np.searchsorted(node, np.arange(len(sizes) + 1))
        return cls(
            first,
            tables.cells,
            own_cell,
            own_option,
            own_table,
            np.concatenate([target, source])[order],
            np.concatenate([one, width])[order],
            np.tile(pairs, 2)[order],
            ends,
            np.concatenate([[0], np.cumsum(counts)])[ends],
            np.tile(begin, 2)[order][end] + at * step[end],
            end,
            first[node][end] + at,
        )

    def own(self, rates: np.ndarray | None = None) -> np.ndarray:
        """Return the sum of every option's entries in tables of its node alone.

        Args:
          rates: factor of every table; None: 1.
        """
        paid = self.cells[self.own_cell]
        if rates is not None:
            paid = paid * rates[self.own_table]
        return np.bincount(self.own_option, paid, self.first[-1])

    def pairs(
        self,
        labels: np.ndarray,
        *,
        free: np.ndarray | None = None,
        rates: np.ndarray | None = None,
    ) -> np.ndarray:
        """Return the sum of every option's entries in tables with other nodes.

        Args:
          labels: the assignment.
          free: boolean array of nodes whose tables do not count at the other end; None:
            none.
          rates: factor of every table; None: 1.
        """
        chosen = self.stride * labels[self.other]
        paid = self.cells[self.begin + chosen[self.end]]
        if rates is not None:
            paid = paid * rates[self.table][self.end]
        if free is not None:
            paid = np.where(free[self.other][self.end], 0.0, paid)
        return np.bincount(self.option, paid, self.first[-1])

    def one(self, node: int, own: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """Return the total of each option of a node, given the other nodes' options.

        Args:
          node: the node.
          own: result of `own`, for all nodes.
          labels: the assignment.
        """
        own = own[self.first[node] : self.first[node + 1]]
        ends = slice(self.ends[node], self.ends[node + 1])
        chosen = self.stride[ends] * labels[self.other[ends]]
        begin = self.begin[self.entries[node] : self.entries[node + 1]]
        cells = begin.reshape(len(chosen), len(own)) + chosen[:, None]
        return own + self.cells[cells].sum(axis=0)


def sum_live(
    start: np.ndarray, stop: np.ndarray, amounts: np.ndarray, end: int
) -> np.ndarray:
    """Return the sum of the live amounts at every time below `end`.

    Args:
      start, stop: each amount is live from `start` up to, not including, `stop`.
      amounts: the amounts.
      end: number of times.
    """
    change = np.bincount(start, amounts, end + 1)
    change -= np.bincount(stop, amounts, end + 1)
    return np.cumsum(change)[:end]


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """Amounts that are live from `start` up to, not including, `stop`."""

    lookups: Lookups
    start: np.ndarray
    stop: np.ndarray

    @classmethod
    def of(cls, held: Sequence[tuple[int, int, np.ndarray, int, int]]) -> Spans:
        """Build spans of (source, target, table, start, stop); tables as in
        `Lookups.of`."""
        source, target, tables, start, stop = (
            zip(*held, strict=True) if held else ((),) * 5
        )
        return cls(
            Lookups.of(source, target, tables),
            np.array(start, dtype=np.int64),
            np.array(stop, dtype=np.int64),
        )

    def profile(self, labels: np.ndarray, end: int) -> np.ndarray:
        """Return the live amount at every time below `end`."""
        return sum_live(self.start, self.stop, self.lookups.entries(labels), end)

    def rates(self, prices: Mapping[int, float]) -> np.ndarray:
        """Return the cost of a unit of each amount over its lifetime.

        Args:
          prices: time → cost per unit live then.
        """
        times = np.array(sorted(prices), dtype=np.int64)
        paid = np.concatenate([[0.0], np.cumsum([prices[int(t)] for t in times])])
        low, high = np.searchsorted(times, [self.start, self.stop])
        return paid[high] - paid[low]
