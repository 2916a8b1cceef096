"""Disjoint sets (union-find).

Assign integer ids, equal for equal things, so that each is processed once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

import numpy as np


T = TypeVar("T")

_LARGEST = int(np.iinfo(np.int64).max)


def number(keys: Iterable[Hashable]) -> np.ndarray:
    """Return an id per key, equal for equal keys, from 0 by first occurrence."""
    numbers: dict[Hashable, int] = {}
    found = [numbers.setdefault(key, len(numbers)) for key in keys]
    return np.array(found, dtype=np.int64)


def number_objects(things: Iterable[object]) -> np.ndarray:
    """Return an id per object, equal for the same object (by identity)."""
    return number(map(id, things))


def number_rows(*columns: np.ndarray) -> np.ndarray:
    """Return an id per row, equal for equal rows, from 0.

    Args:
      columns: at least one array [rows] of non-negative integers or bools.
    """
    found, size = np.zeros(len(columns[0]), dtype=np.int64), 1
    for column in columns:
        digits, base = column, _span(column)
        if size * base > _LARGEST:
            found = np.unique(found, return_inverse=True)[1]
            digits = np.unique(column, return_inverse=True)[1]
            size, base = _span(found), _span(digits)
        found = found * base + digits
        size *= base
    return np.unique(found, return_inverse=True)[1]


def _span(digits: np.ndarray) -> int:
    assert digits.min(initial=0) >= 0
    return int(digits.max(initial=0)) + 1


def groups(numbers: np.ndarray) -> list[np.ndarray]:
    """Return the positions of every id, from 0; each id occurs."""
    if not len(numbers):
        return []
    order = np.argsort(numbers, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1)


def for_each(numbers: np.ndarray, make: Callable[[int], T]) -> list[T]:
    """Return `make(i)` for every position, where `i` is the first one of its id.

    `make` is called once per id.
    """
    different, first = np.unique(numbers, return_index=True)
    each = zip(different.tolist(), first.tolist(), strict=True)
    made = {k: make(at) for k, at in each}
    return [made[k] for k in numbers.tolist()]


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
