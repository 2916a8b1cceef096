"""Masks as functions of the row and column of token pairs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from rhino_jax.ir.axes import AxisSpan
from rhino_jax.passes.sequence_slices.bounds import MODERATE, Bounds
from rhino_jax.passes.sequence_slices.states import Fill, Later, Seen


LOW = -5 * MODERATE
"""Upper bound of values that add nothing to a softmax.

Added to a moderate score, their exponential is zero in float32, as that of -104 is.
Half of -1e4, the smallest magnitude that masks add in float16 (whose least number is
-65,504), so that it is still low when a score is added.
"""


@dataclass(frozen=True, eq=False)
class Corner:
    """Bounds of a whole value by row and column.

    Attributes:
      low, high: [rows, columns], or views of that.
      is_after: [rows, columns], whether the column is after the row.
    """

    low: Any
    high: Any
    is_after: Any

    @cached_property
    def later(self) -> Later:
        """Facts about the pairs, where the value is an operand of an op."""
        least = np.min(self.low, initial=np.inf, where=self.is_after)
        most = np.max(self.high, initial=-np.inf, where=self.is_after)
        seen = self.seen(self.low >= -MODERATE)
        if least == most == 0:
            return Later(Fill.ZERO, seen=seen)
        return low(float(most), seen, may_be_low=bool(least < -MODERATE))

    @property
    def is_moderate(self) -> Any:
        """[rows, columns], whether elements are surely as moderate as activations."""
        return (self.low >= -MODERATE) & (self.high <= MODERATE)

    @property
    def is_never(self) -> bool:
        """Whether no boolean can be true in a later column."""
        return not np.any(self.high.astype(bool) & self.is_after)

    @property
    def is_always(self) -> bool:
        return bool(np.all(self.low.astype(bool) | ~self.is_after))

    def seen(self, surely: Any) -> Seen:
        """Return how many columns up to the row are surely seen.

        Args:
          surely: [rows, columns], whether the column is surely seen.
        """
        if np.all(surely | self.is_after):
            return Seen.ALL
        any_in_row = np.any(surely & ~self.is_after, axis=1)
        return Seen.ONE if np.all(any_in_row) else Seen.NONE

    @property
    def leak(self) -> str:
        """A later column that may be seen, in words."""
        may_be = self.high.astype(bool) & self.is_after
        if not np.any(may_be):
            return ""
        row, column = np.unravel_index(int(np.argmax(may_be)), may_be.shape)
        return f"token {row} may see token {column}"


def low(most: float, seen: Seen, *, may_be_low: bool = True) -> Later:
    """Return facts about later pairs with an upper bound: low, if it is low enough.

    Args:
      most: the upper bound.
      seen: how many of the other columns are surely not low.
      may_be_low: whether some may be low where not all are.
    """
    if most <= LOW:
        return Later(Fill.LOW, most, seen, may_be_low=True)
    return Later(seen=seen, may_be_low=may_be_low, may_be_high=not most <= MODERATE)


def corner_of(
    bounds: Bounds | None,
    dims: tuple[int | None, int | None],
    row: AxisSpan,
    column: AxisSpan,
) -> Corner | None:
    """Return bounds by row and column; None where nothing is known.

    Args:
      bounds: of a whole value.
      dims: its dims of rows and of columns; None: it is the same for all of them.
      row, column: which tokens of the sequence these dims hold.
    """
    if bounds is None:
        return None
    columns = np.arange(column.first, column.first + column.size)
    rows = np.arange(row.first, row.first + row.size)
    after = columns > rows.reshape(-1, 1)

    def by_pair(x: Any, reduce: Any) -> Any:
        x = reduce(x, axis=tuple(d for d in range(x.ndim) if d not in dims))
        first, second = dims
        if first is not None and second is not None and first > second:
            x = x.T
        if first is None or second is None:
            x = x.reshape(1 if first is None else -1, 1 if second is None else -1)
        return np.broadcast_to(x, after.shape)

    return Corner(by_pair(bounds.low, np.min), by_pair(bounds.high, np.max), after)
