"""A problem's costs and memory in flat arrays: a choice is summed up at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class Lookups:
    """One entry of each of several tables, by the options of a node or of two.

    Tables that are one array are kept once.

    Attributes:
      source, target: nodes whose options say row and column.
      begin, width: of each table in `cells`.
      cells: the tables' entries.
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
        """Of tables [options of source, options of target]; of vectors where a node
        alone says the entry, with the same node at both ends."""
        ids = np.fromiter(map(id, tables), dtype=np.int64, count=len(tables))
        _, first, which = np.unique(ids, return_index=True, return_inverse=True)
        kept = [tables[k] for k in first.tolist()]
        sizes = np.array([t.size for t in kept], dtype=np.int64)
        # A vector's entry is its column, in a row of no width.
        widths = [t.shape[1] if t.ndim == 2 else 0 for t in kept]
        return cls(
            np.array(sources, dtype=np.int64),
            np.array(targets, dtype=np.int64),
            (np.cumsum(sizes) - sizes)[which],
            np.array(widths, dtype=np.int64)[which],
            np.concatenate([*(t.ravel() for t in kept), np.zeros(0)]),
        )

    def entries(self, labels: np.ndarray) -> np.ndarray:
        """The entry of every table under a choice."""
        rows = self.begin + labels[self.source] * self.width
        return self.cells[rows + labels[self.target]]


@dataclass(frozen=True, slots=True, eq=False)
class Beside:
    """What every option costs beside what the other nodes choose.

    Of every edge both ends count, of one node after the other; an end has an entry for
    every option of its node.

    Attributes:
      first: where every node's options begin among all, and their number.
      own: of every option, what it costs by itself.
      cells: the edges' tables.
      other, stride: of every end, the node at the other, and how far apart its options
        are in the table.
      ends, entries: where every node's begin, and their number.
      begin: of every entry, its cell where the other node takes its first option.
      end, option: of every entry, its end, and its option among all.
    """

    first: np.ndarray
    own: np.ndarray
    cells: np.ndarray
    other: np.ndarray
    stride: np.ndarray
    ends: np.ndarray
    entries: np.ndarray
    begin: np.ndarray
    end: np.ndarray
    option: np.ndarray

    @classmethod
    def of(cls, nodes: Lookups, edges: Lookups, sizes: np.ndarray) -> Beside:
        """
        Args:
          nodes: the costs of all nodes, in order.
          edges: tables of two nodes each, or of one with itself.
          sizes: the number of options of every node.
        """
        first = np.concatenate([[0], np.cumsum(sizes)])
        each = np.repeat(np.arange(len(sizes)), sizes)
        option = np.arange(first[-1]) - first[each]
        own = nodes.cells[nodes.begin[each] + option]
        loops = np.flatnonzero(edges.source == edges.target)
        for k in loops.tolist():
            node, begin, width = edges.source[k], edges.begin[k], edges.width[k]
            diagonal = begin + np.arange(width) * (width + 1)
            own[first[node] : first[node + 1]] += edges.cells[diagonal]
        source, target, begin, width = (
            np.delete(x, loops)
            for x in (edges.source, edges.target, edges.begin, edges.width)
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
            own,
            edges.cells,
            np.concatenate([target, source])[order],
            np.concatenate([one, width])[order],
            ends,
            np.concatenate([[0], np.cumsum(counts)])[ends],
            np.tile(begin, 2)[order][end] + at * step[end],
            end,
            first[node][end] + at,
        )

    def all(self, labels: np.ndarray) -> np.ndarray:
        """Of the options of all nodes."""
        chosen = self.stride * labels[self.other]
        paid = self.cells[self.begin + chosen[self.end]]
        return self.own + np.bincount(self.option, paid, len(self.own))

    def one(self, node: int, labels: np.ndarray) -> np.ndarray:
        """Of the options of one node."""
        own = self.own[self.first[node] : self.first[node + 1]]
        ends = slice(self.ends[node], self.ends[node + 1])
        chosen = self.stride[ends] * labels[self.other[ends]]
        begin = self.begin[self.entries[node] : self.entries[node + 1]]
        cells = begin.reshape(len(chosen), len(own)) + chosen[:, None]
        return own + self.cells[cells].sum(axis=0)


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """Amounts that are held from `start` up to, not including, `stop`."""

    lookups: Lookups
    start: np.ndarray
    stop: np.ndarray

    def profile(self, labels: np.ndarray, end: int) -> np.ndarray:
        """What is held at every time below `end`."""
        amounts = self.lookups.entries(labels)
        change = np.bincount(self.start, amounts, end + 1)
        change -= np.bincount(self.stop, amounts, end + 1)
        return np.cumsum(change)[:end]

    def rates(self, prices: Mapping[int, float]) -> np.ndarray:
        """What a unit of each amount costs while it is held.

        Args:
          prices: time → cost per unit of memory then.
        """
        times = np.array(sorted(prices), dtype=np.int64)
        paid = np.concatenate([[0.0], np.cumsum([prices[int(t)] for t in times])])
        low, high = np.searchsorted(times, [self.start, self.stop])
        return paid[high] - paid[low]
