"""Choices of which some options are left, in their own terms and in the whole's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class Restriction:
    """The options that are left of every node.

    Attributes:
      allowed: their positions among the whole's; nodes may share an array.
      flat: the same, of one node after the other.
      first: where every node's begin in `flat`.
      whole: where its options begin among those of all nodes.
      size: the number of options of all nodes.
    """

    allowed: Sequence[np.ndarray]
    flat: np.ndarray
    first: np.ndarray
    whole: np.ndarray
    size: int

    @classmethod
    def of(
        cls, costs: Sequence[np.ndarray], allowed: Sequence[np.ndarray]
    ) -> Restriction:
        """
        Args:
          costs: of every node's options, all of them.
          allowed: for every node, indices of options.
        """
        left = np.array([len(a) for a in allowed], dtype=np.int64)
        sizes = np.array([len(c) for c in costs], dtype=np.int64)
        flat = np.concatenate([*allowed, np.zeros(0, dtype=np.int64)])
        return cls(
            allowed,
            flat,
            np.cumsum(left) - left,
            np.cumsum(sizes) - sizes,
            int(sizes.sum()),
        )

    def expand(self, labels: np.ndarray) -> np.ndarray:
        """A choice in terms of the whole's options."""
        return self.flat[self.first + labels]

    def contract(self, labels: np.ndarray) -> np.ndarray | None:
        """A choice of the whole's options in terms of those that are left, or None
        where it uses others."""
        left = np.diff(self.first, append=len(self.flat))
        places = np.full(self.size, -1)
        every = np.arange(len(self.flat)) - np.repeat(self.first, left)
        places[np.repeat(self.whole, left) + self.flat] = every
        found = places[self.whole + labels]
        return None if (found < 0).any() else found
