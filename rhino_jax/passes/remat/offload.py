"""Values that are in host memory until the backward pass reads them.

How compilers treat the copies (jax 0.10.2, libtpu 0.0.52): XLA:TPU copies slices of a
loop's stacks out and in, step by step (a GPT of 2 layers on four v5e, three stacks:
peak 189 to 93 MiB). Values outside of loops it copies out and back in at once, at one
point of the schedule, which saves nothing. XLA:GPU, compile-only, and XLA:CPU drop the
copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax


AHEAD = 40
"""Ops between the fetch of a value and its first reader: the copy overlaps them."""


def to_host(array: Any) -> Any:
    """Copy an array to host memory; XLA:CPU leaves it where it is."""
    return jax.device_put(array, jax.memory.Space.Host)


def from_host(array: Any, ties: Sequence[Any] = ()) -> Any:
    """Copy an array back to the device, not before the arrays `ties` are available."""
    if ties:
        array, *_ = lax.optimization_barrier([array, *ties])
    return jax.device_put(array, jax.memory.Space.Device)


def waits_on_host(array: Any) -> bool:
    """Whether an array is in the host's memory."""
    return getattr(jax.typeof(array), "memory_space", None) == jax.memory.Space.Host
