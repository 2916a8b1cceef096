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
        begins: dict[int, int] = {}
        kept: list[np.ndarray] = []
        end = 0
        begin = np.empty(len(tables), dtype=np.int64)
        for k, table in enumerate(tables):
            at = begins.get(id(table))
            if at is None:
                at = begins[id(table)] = end
                kept.append(table.ravel())
                end += table.size
            begin[k] = at
        # A vector's entry is its column, in a row of no width.
        width = [t.shape[1] if t.ndim == 2 else 0 for t in tables]
        return cls(
            np.array(sources, dtype=np.int64),
            np.array(targets, dtype=np.int64),
            begin,
            np.array(width, dtype=np.int64),
            np.concatenate([*kept, np.zeros(0)]),
        )

    def entries(self, labels: np.ndarray) -> np.ndarray:
        """The entry of every table under a choice."""
        rows = self.begin + labels[self.source] * self.width
        return self.cells[rows + labels[self.target]]


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
