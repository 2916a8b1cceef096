"""Convert arrays between logical and interleaved (block-cyclic) order of a dim."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rhino_jax.ir.transform import InterleavedOrder


def stored(x: Any, dim: int, blocks: InterleavedOrder) -> Any:
    """Convert a dim from logical to interleaved order.

    Args:
      x: array of any rank, of JAX or NumPy.
      dim: the dim to reorder, of `blocks.size` elements.
      blocks: the interleaved order.
    Returns:
      An array of the same library and shape.
    """
    if _is_even(blocks):
        return _turned(x, dim, len(blocks.parts), blocks.count)
    shares = [
        part.reshape(split_shape(part.shape, dim, blocks.count))
        for part in _cut(x, dim, blocks.parts)
    ]
    return _library(x).concatenate(shares, dim + 1).reshape(x.shape)


def written(x: Any, dim: int, blocks: InterleavedOrder) -> Any:
    """Convert a dim from interleaved to logical order: the inverse of `stored`."""
    if _is_even(blocks):
        return _turned(x, dim, blocks.count, len(blocks.parts))
    apart = x.reshape(split_shape(x.shape, dim, blocks.count))
    shares = _cut(apart, dim + 1, [part // blocks.count for part in blocks.parts])
    parts = [
        share.reshape((*x.shape[:dim], part, *x.shape[dim + 1 :]))
        for share, part in zip(shares, blocks.parts, strict=True)
    ]
    return _library(x).concatenate(parts, dim)


def all_stored(x: Any, dims: Iterable[tuple[int, InterleavedOrder]]) -> Any:
    """Convert several dims from logical to interleaved order."""
    for dim, blocks in dims:
        x = stored(x, dim, blocks)
    return x


def all_written(x: Any, dims: Iterable[tuple[int, InterleavedOrder]]) -> Any:
    """Convert several dims from interleaved to logical order."""
    for dim, blocks in dims:
        x = written(x, dim, blocks)
    return x


def split_shape(shape: Sequence[int], dim: int, count: int) -> tuple[int, ...]:
    """Return a shape with one dim split into (blocks, elements of each)."""
    return (*shape[:dim], count, shape[dim] // count, *shape[dim + 1 :])


def _is_even(blocks: InterleavedOrder) -> bool:
    """Whether all parts have the same size."""
    return len(set(blocks.parts)) == 1


def _turned(x: Any, dim: int, major: int, minor: int) -> Any:
    """Transpose a dim of (major, minor, rest) to (minor, major, rest)."""
    rest = x.shape[dim] // (major * minor)
    apart = x.reshape((*x.shape[:dim], major, minor, rest, *x.shape[dim + 1 :]))
    return _library(x).swapaxes(apart, dim, dim + 1).reshape(x.shape)


def _library(x: Any) -> Any:
    """Return the array library of an array: `jax.numpy` or NumPy."""
    return jnp if isinstance(x, jax.Array) else np


def _cut(x: Any, dim: int, parts: Sequence[int]) -> list[Any]:
    """Split a dim into parts, each an array."""
    return list(_library(x).split(x, [*accumulate(parts)][:-1], dim))
