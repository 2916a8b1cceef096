"""Restrictions to some options, and conversion between restricted and whole options."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True, eq=False)
class Restrictions:
    """The options that each of several restrictions leaves to kinds of nodes.

    Attributes:
      first: first option of every kind among those of all kinds.
      counts: [restrictions, kinds], number of options left.
      kinds: kind of every node.
      places: [restrictions, options of all kinds], position of an option among those
        left of its kind; -1 if it is not left.
      begin: first place of every kind in a row of `flat`.
      flat: [restrictions, places], the options left, kind after kind, as positions
        among those of the kind. All restrictions have equally many places: their last
        option is repeated.
    """

    first: np.ndarray
    counts: np.ndarray
    kinds: np.ndarray
    places: np.ndarray
    begin: np.ndarray
    flat: np.ndarray

    @classmethod
    def of(
        cls, permitted: np.ndarray, first: np.ndarray, kinds: np.ndarray
    ) -> Restrictions:
        """Build restrictions.

        Args:
          permitted: boolean, [restrictions, options of all kinds]; at least one of each
            kind.
          first, kinds: see `Restrictions`.
        """
        counts = np.add.reduceat(permitted, first, axis=1, dtype=np.int64)
        starts = np.cumsum(counts, axis=1) - counts
        sizes = np.diff(first, append=permitted.shape[1])
        ranks = np.cumsum(permitted, axis=1) - 1 - np.repeat(starts, sizes, axis=1)
        most = counts.max(axis=0)
        begin = np.cumsum(most) - most
        kind = np.repeat(np.arange(len(most)), most)
        rank = np.minimum(np.arange(len(kind)) - begin[kind], counts[:, kind] - 1)
        left = [np.flatnonzero(row) for row in permitted]
        flat = [
            row[place] - first[kind]
            for row, place in zip(left, starts[:, kind] + rank, strict=True)
        ]
        places = np.where(permitted, ranks, -1)
        return cls(first, counts, kinds, places, begin, np.array(flat))

    @cached_property
    def options(self) -> list[np.ndarray]:
        """Options of each node, [restrictions, places]; nodes of a kind share an
        array."""
        of_kind = np.split(self.flat, self.begin[1:], axis=1)
        return [of_kind[k] for k in self.kinds.tolist()]

    def expand(self, restriction: int, labels: np.ndarray) -> np.ndarray:
        """Convert an assignment of places to options of the whole problem, [nodes]."""
        return self.flat[restriction, self.begin[self.kinds] + labels]

    def contract(self, restriction: int, labels: np.ndarray) -> np.ndarray:
        """Convert options of the whole problem to places, [nodes]; -1 if not left."""
        return self.places[restriction, self.first[self.kinds] + labels]
