"""Choices of which some options are left, in their own terms and in the whole's."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True, eq=False)
class Restrictions:
    """The options that each of several restrictions leaves to kinds of nodes.

    Attributes:
      first: where every kind's options begin among those of all kinds.
      counts: [restrictions, kinds], how many are left.
      kinds: of every node its kind.
      places: [restrictions, options of all kinds], which of those of its kind that are
        left an option is; -1 where it is not left.
      begin: where every kind's begin in `lookups`.
      flat: [restrictions, places], the options that are left, of one kind after the
        other, as positions among those of the kind. All restrictions have as many
        places: they repeat their last.
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
        """
        Args:
          permitted: [restrictions, options of all kinds]; at least one of each kind.
          first, kinds: see above.
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
        """[restrictions, places] of every node; nodes of a kind share an array."""
        of_kind = np.split(self.flat, self.begin[1:], axis=1)
        return [of_kind[k] for k in self.kinds.tolist()]

    def expand(self, restriction: int, labels: np.ndarray) -> np.ndarray:
        """[nodes], a choice of places in terms of the whole's options."""
        return self.flat[restriction, self.begin[self.kinds] + labels]

    def contract(self, restriction: int, labels: np.ndarray) -> np.ndarray:
        """[nodes], a choice of the whole's options in terms of one restriction's; -1
        where it does not leave them."""
        return self.places[restriction, self.first[self.kinds] + labels]
