"""Values that wait in the host's memory until the backward pass reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax


AHEAD = 40
"""How many lines before the first that reads it a value is asked for: copies run beside
what is computed meanwhile."""


def to_host(array: Any) -> Any:
    """A copy in the memory of the host; XLA:CPU leaves it where it is."""
    return jax.device_put(array, jax.memory.Space.Host)


def from_host(array: Any, ties: Sequence[Any] = ()) -> Any:
    """A copy on the device again, not before these arrays are there."""
    if ties:
        array, *_ = lax.optimization_barrier([array, *ties])
    return jax.device_put(array, jax.memory.Space.Device)


def waits_on_host(array: Any) -> bool:
    """Whether an array is in the host's memory."""
    return getattr(jax.typeof(array), "memory_space", None) == jax.memory.Space.Host
