"""Disjoint sets (union-find)."""

from __future__ import annotations

import numpy as np


class DisjointSets:
    """Disjoint sets of the integers below `size`, each named by its smallest member.

    Source: Tarjan and van Leeuwen, "Worst-case analysis of set union algorithms" (JACM
    1984), with path halving.

    Args:
      size: number of members, 0 to `size - 1`.
    """

    def __init__(self, size: int) -> None:
        self._up = list(range(size))

    def find(self, member: int) -> int:
        """Return the name of a member's set: its smallest member."""
        up = self._up
        while up[member] != member:
            up[member] = member = up[up[member]]
        return member

    def union(self, a: int, b: int) -> None:
        a, b = self.find(a), self.find(b)
        if a < b:
            self._up[b] = a
        else:
            self._up[a] = b

    def names(self) -> list[int]:
        """Return the name of every member's set."""
        return [self.find(member) for member in range(len(self._up))]


def united(size: int, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the name (smallest member) of every member's set, from all pairs at once.

    Vectorized: each round, the names of both ends of a pair become the smaller one,
    until they are equal for all pairs.

    Source: Shiloach and Vishkin, "An O(log n) parallel connectivity algorithm" (Journal
    of Algorithms 1982).

    Args:
      size: number of members, 0 to `size - 1`.
      a, b: int arrays [pairs]: members that are in one set.
    """
    names = np.arange(size)
    while len(a):
        low, high = np.minimum(names[a], names[b]), np.maximum(names[a], names[b])
        differ = low < high
        a, b = low[differ], high[differ]
        np.minimum.at(names, b, a)
        before = None
        while before is None or (before != names).any():
            before, names = names, names[names]
    return names
