"""Values that wait in the host's memory until the backward pass reads them.

What compilers make of it (jax 0.10.2, libtpu 0.0.52): XLA:TPU copies slices of a loop's
stacks out and in, step by step (a GPT of 2 layers on four v5e, three stacks: peak 189
to 93 MiB). Values of straight lines it copies out and at once in again, in one place of
the schedule, which saves nothing. XLA:GPU, compile-only, and XLA:CPU drop the moves.
"""

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
