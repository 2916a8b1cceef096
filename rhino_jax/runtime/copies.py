"""Copy arrays that are donated or captured while the user holds references to them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any


def _count_of_one_holder() -> int:
    """Return `sys.getrefcount` of an array in our list and in one other place."""
    holder = [object()]
    return next(map(sys.getrefcount, list(holder)))


_HELD_ONCE = _count_of_one_holder()


def unshared(arrays: list[Any], owned: Sequence[int]) -> list[Any]:
    """Return arrays with copies of the donated ones that the user holds elsewhere, too.

    An object's previous array is of no use to it, so it is donated without a request;
    but the user may have it in a snapshot, or in a moving average that began as a copy.

    Args:
      arrays: the arrays of a call; only this list and the user's objects may hold
        references to those at `owned`.
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
    """Return a copy in a buffer of its own; a Python scalar as it is.

    `device_put` may share the buffer, whatever its options, where it moves an array.
    """
    return x.copy() if hasattr(x, "copy") else x
