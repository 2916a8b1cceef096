"""A cache of derived arrays: equal inputs share one result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np


@dataclass(slots=True, eq=False)
class Memo:
    """Cache of arrays by the function and the arrays that they are computed from."""

    # With references to the inputs, so that no id is reused for another array.
    _made: dict[tuple[object, ...], tuple[np.ndarray, tuple[np.ndarray, ...]]] = field(
        default_factory=dict
    )

    def make(self, how: Callable[..., np.ndarray], *of: np.ndarray) -> np.ndarray:
        """Return `how(*of)`, cached."""
        key = (how, *map(id, of))
        found = self._made.get(key)
        if found is None:
            found = self._made[key] = how(*of), of
        return found[0]

    def scaled(self, table: np.ndarray, factor: float) -> np.ndarray:
        """Return the table times a factor, cached."""
        key = factor, id(table)
        found = self._made.get(key)
        if found is None:
            found = self._made[key] = factor * table, (table,)
        return found[0]

    def transposed(self, table: np.ndarray) -> np.ndarray:
        """Return the table with its last two dims swapped; twice is the original."""
        other = self.make(np.matrix_transpose, table)
        self._made[np.matrix_transpose, id(other)] = table, (other,)
        return other
