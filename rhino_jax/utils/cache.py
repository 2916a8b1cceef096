"""Arrays made of arrays: alike nodes share theirs, and what is made of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np


@dataclass(slots=True, eq=False)
class Memo:
    """Makes arrays of the same arrays in the same way once."""

    # With what they are made of, so that no id passes to another array.
    _made: dict[tuple[object, ...], tuple[np.ndarray, tuple[np.ndarray, ...]]] = field(
        default_factory=dict
    )

    def make(self, how: Callable[..., np.ndarray], *of: np.ndarray) -> np.ndarray:
        """`how(*of)`."""
        key = (how, *map(id, of))
        found = self._made.get(key)
        if found is None:
            found = self._made[key] = how(*of), of
        return found[0]

    def scaled(self, table: np.ndarray, factor: float) -> np.ndarray:
        """The table times a factor."""
        key = factor, id(table)
        found = self._made.get(key)
        if found is None:
            found = self._made[key] = factor * table, (table,)
        return found[0]

    def transposed(self, table: np.ndarray) -> np.ndarray:
        """With its last two dims turned round; twice is the table itself."""
        other = self.make(np.matrix_transpose, table)
        self._made[np.matrix_transpose, id(other)] = table, (other,)
        return other
