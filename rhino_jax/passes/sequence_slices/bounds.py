"""Bounds of the elements of what is made of constants and data: masks, mostly.

They are NumPy arrays in which dims along which nothing differs have size one, so that
a mask that is broadcast to all heads is as small as it was.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np


MODERATE = 1e3
"""Floats that are made of weights or activations, beside what masks add to scores of
attention, are taken to be no larger. (A score of 100 is a probability of 1.)"""


@dataclass(frozen=True, eq=False)
class Bounds:
    """Attributes:
    low, high: [.., size or 1, ..]; the same array where elements are known.
    is_assumed: whether they hold of weights that are `MODERATE`.
    """

    low: Any
    high: Any
    is_assumed: bool = False

    @property
    def is_exact(self) -> bool:
        return self.low is self.high

    @cached_property
    def least(self) -> float:
        """A bound of all elements from below."""
        return float(np.min(self.low))

    @cached_property
    def most(self) -> float:
        """A bound of all elements from above."""
        return float(np.max(self.high))

    @cached_property
    def may_be_low(self) -> bool:
        """Whether some may be less than what is made of weights."""
        return bool(np.any(self.low < -MODERATE))


def exactly(x: Any) -> Bounds:
    array = np.asarray(x)
    return Bounds(array, array)


def unknown(dtype: Any, rank: int) -> Bounds | None:
    """Of elements of which nothing is known; of numbers, None."""
    if dtype != np.bool_:
        return None
    ones = (1,) * rank
    return Bounds(np.zeros(ones, bool), np.ones(ones, bool))
