"""Bounds of elements of values that depend on constants and data: masks, mostly.

They are NumPy arrays in which dims along which nothing differs have size one, so that a
mask that is broadcast to all heads is as small as it was.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np


MODERATE = 1e3
"""Assumed largest magnitude of floats that depend on weights or activations.

What masks add to attention scores is not counted. (A score of 100 is a probability of
1.)
"""


@dataclass(frozen=True, eq=False)
class Bounds:
    """Lower and upper bounds of a value's elements.

    Attributes:
      low, high: [.., size or 1, ..]; the same array where elements are known.
      is_assumed: whether they hold only for weights and activations within `MODERATE`.
    """

    low: Any
    high: Any
    is_assumed: bool = False

    @property
    def is_exact(self) -> bool:
        return self.low is self.high

    @cached_property
    def least(self) -> float:
        """A lower bound of all elements."""
        return float(np.min(self.low))

    @cached_property
    def most(self) -> float:
        """An upper bound of all elements."""
        return float(np.max(self.high))

    @cached_property
    def may_be_low(self) -> bool:
        """Whether some elements may be less than any value of weights."""
        return self.least < -MODERATE

    @cached_property
    def may_be_high(self) -> bool:
        """Whether some floats may be more than any value of weights."""
        return "float" in str(self.high.dtype) and self.most > MODERATE


def exactly(x: Any) -> Bounds:
    array = np.asarray(x)
    return Bounds(array, array)


def unknown(dtype: Any, rank: int) -> Bounds | None:
    """Return bounds of unknown elements: False to True, or None for numbers."""
    if dtype != np.bool_:
        return None
    ones = (1,) * rank
    return Bounds(np.zeros(ones, bool), np.ones(ones, bool))
