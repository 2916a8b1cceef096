"""Copies of arrays that are donated, or kept, while the user holds them, too."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any


def _count_of_one_holder() -> int:
    """What `sys.getrefcount` says of an array in our list and in one other place."""
    holder = [object()]
    return next(map(sys.getrefcount, list(holder)))


_HELD_ONCE = _count_of_one_holder()


def unshared(arrays: list[Any], owned: Sequence[int]) -> list[Any]:
    """Copies in place of donated arrays that the user holds elsewhere, too.

    What an object held before is of no use to it, so it is donated unasked; but it may
    be in a snapshot, or in a moving average that began as a copy.

    Args:
      arrays: the arrays of a call; of those below, nothing but this list and the user's
        objects may hold any.
      owned: positions of the donated arrays that objects hold.
    """
    counts = list(map(sys.getrefcount, arrays))
    held = [i for i in owned if counts[i] > _HELD_ONCE]
    if not held:
        return arrays
    arrays = list(arrays)
    for i in held:
        arrays[i] = copied(arrays[i])
    return arrays


def copied(x: Any) -> Any:
    """A copy in memory of its own; a Python scalar as it is.

    `device_put` shares memory, whatever it is told, if it moves an array.
    """
    return x.copy() if hasattr(x, "copy") else x
