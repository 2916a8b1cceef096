"""Numbers for things, so that what is alike is looked at once."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

import numpy as np


def number(keys: Iterable[Hashable]) -> np.ndarray:
    """Equal keys, equal numbers, from 0 on in the order in which they are met."""
    numbers: dict[Hashable, int] = {}
    found = [numbers.setdefault(key, len(numbers)) for key in keys]
    return np.array(found, dtype=np.int64)


def number_rows(*columns: np.ndarray) -> np.ndarray:
    """Equal rows, equal numbers, from 0 on.

    Args:
      columns: at least one; of whole numbers, all as long.
    """
    found = np.unique(columns[0], return_inverse=True)[1]
    for column in columns[1:]:
        other = np.unique(column, return_inverse=True)[1]
        pairs = found * (int(other.max(initial=0)) + 1) + other
        found = np.unique(pairs, return_inverse=True)[1]
    return found


def groups(numbers: np.ndarray) -> list[np.ndarray]:
    """For every number, from 0 on, where it is; each occurs."""
    if not len(numbers):
        return []
    order = np.argsort(numbers, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1)
