"""Compute JAX's random words by position."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import random as jex_random


def key_words(key: Any) -> Any:
    """Return the two words of a threefry key, uint32 [2]."""
    return jax.random.key_data(key)


def threefry_words(words: Any, at: Any, dtype: Any) -> Any:
    """Return the words that `random_bits` draws at some positions of the whole array.

    As `_threefry_random_bits_partitionable` does (jax/_src/random/threefry2x32.py,
    before 0.10 in jax/_src/prng.py), for fewer than 2³² words. Same on both versions.

    Args:
      words: words of the key, uint32 [2].
      at: flat positions, uint32, any shape.
      dtype: unsigned dtype to draw.
    """
    high = lax.full_like(at, 0)
    first, second = jex_random.threefry2x32_p.bind(
        *(jnp.broadcast_to(words[i], at.shape) for i in (0, 1)), high, at
    )
    bits = jnp.dtype(dtype).itemsize * 8
    if bits == 64:
        first, second = (lax.convert_element_type(x, dtype) for x in (first, second))
        return lax.shift_left(first, lax.full_like(first, 32)) | second
    return lax.convert_element_type(first ^ second, dtype)
