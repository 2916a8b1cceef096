"""Disjoint sets of things that turn out to be one."""

from __future__ import annotations

import numpy as np


class DisjointSets:
    """Sets of numbers that are united step by step; each is named by its smallest.

    Source: Tarjan and van Leeuwen, "Worst-case analysis of set union algorithms" (JACM
    1984), with path halving.

    Args:
      size: the numbers are those below it.
    """

    def __init__(self, size: int) -> None:
        self._up = list(range(size))

    def find(self, member: int) -> int:
        """The set of a number, as its smallest."""
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
        """The set of every number."""
        return [self.find(member) for member in range(len(self._up))]


def united(size: int, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The set of every number, as its smallest, where pairs are known at once.

    Every set's name goes over to the smallest name beside it, until none is left.

    Source: Shiloach and Vishkin, "An O(log n) parallel connectivity algorithm"
    (Journal of Algorithms 1982).

    Args:
      size: the numbers are those below it.
      a, b: [pairs], numbers that are in one set.
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
