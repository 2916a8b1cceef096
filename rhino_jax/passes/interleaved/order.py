"""Arrays with a dim in blocks, and as it is written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rhino_jax.ir.blocks import InterleavedOrder


def stored(x: Any, dim: int, blocks: InterleavedOrder) -> Any:
    """An array as it is stored, of one as it is written; NumPy stays NumPy.

    Args:
      x: array of any rank.
      dim: which dim to reorder, of `blocks.size` elements.
      blocks: how.
    Returns:
      An array of the same shape.
    """
    if _is_even(blocks):
        return _turned(x, dim, len(blocks.parts), blocks.count)
    shares = [
        part.reshape(split_shape(part.shape, dim, blocks.count))
        for part in _cut(x, dim, blocks.parts)
    ]
    return _library(x).concatenate(shares, dim + 1).reshape(x.shape)


def written(x: Any, dim: int, blocks: InterleavedOrder) -> Any:
    """The inverse of `stored`."""
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
    """An array with several dims as they are stored."""
    for dim, blocks in dims:
        x = stored(x, dim, blocks)
    return x


def all_written(x: Any, dims: Iterable[tuple[int, InterleavedOrder]]) -> Any:
    """The inverse of `all_stored`."""
    for dim, blocks in dims:
        x = written(x, dim, blocks)
    return x


def split_shape(shape: Sequence[int], dim: int, count: int) -> tuple[int, ...]:
    """A shape with a dim as (blocks, elements of each)."""
    return (*shape[:dim], count, shape[dim] // count, *shape[dim + 1 :])


def _is_even(blocks: InterleavedOrder) -> bool:
    return len(set(blocks.parts)) == 1


def _turned(x: Any, dim: int, major: int, minor: int) -> Any:
    """A dim of (major, minor, rest) as one of (minor, major, rest)."""
    rest = x.shape[dim] // (major * minor)
    apart = x.reshape((*x.shape[:dim], major, minor, rest, *x.shape[dim + 1 :]))
    return _library(x).swapaxes(apart, dim, dim + 1).reshape(x.shape)


def _library(x: Any) -> Any:
    return jnp if isinstance(x, jax.Array) else np


def _cut(x: Any, dim: int, parts: Sequence[int]) -> list[Any]:
    """The parts of a dim, each an array."""
    return list(_library(x).split(x, [*accumulate(parts)][:-1], dim))
