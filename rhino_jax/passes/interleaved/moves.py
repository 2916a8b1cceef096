"""Ops that split, join or reshape dims in interleaved storage; arrays between logical
and interleaved (block-cyclic) order of a dim.

A slice, pad, split or concatenation at the bounds of parts is done in each block. A
reshape of `(3 · h · k)` to `(3, h, k)` is one in each block, and interleaves `h`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rhino_jax.frontend.rules.shape import DimMove
from rhino_jax.ir.program import Op
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


class DimRef(NamedTuple):
    """One dim of a value.

    Attributes:
      value: value id.
      dim: position of the dim.
    """

    value: int
    dim: int


Marks = Mapping[DimRef, InterleavedOrder]
"""Interleaved dims → their order."""


def pieces_in_blocks(
    move: DimMove, marks: Marks
) -> dict[DimRef, InterleavedOrder] | None:
    """Return the interleaved order of the parts that an op reads or writes.

    Args:
      move: the op.
      marks: interleaved dims.
    Returns:
      Orders of the values that have more than one part of the whole dim; None where
      some value has a fraction of a part, or the dim is in logical order.
    """
    blocks = marks.get(DimRef(move.whole, move.dim))
    if blocks is None:
        return None
    found = {}
    for value, start, stop in move.pieces:
        piece = blocks.between(start, stop)
        if piece is None:
            return None
        if len(piece.parts) > 1:
            found[DimRef(value, move.dim)] = piece
    return found


def run_move(eqn: Any, move: DimMove, count: int, arrays: Sequence[Any]) -> list[Any]:
    """Run a slice, pad, split or concatenation in each block.

    Args:
      eqn: its equation.
      move: the parts that it reads or writes.
      count: number of blocks.
      arrays: its operands, in interleaved order.
    Returns:
      Its results, in interleaved order.
    """
    d, name, params = move.dim, eqn.primitive.name, eqn.params
    shapes = [v.aval.shape for v in eqn.outvars]
    apart = [x.reshape(split_shape(x.shape, d, count)) if x.ndim else x for x in arrays]
    if name == "split":
        sizes = tuple(size // count for size in params["sizes"])
        results = list(lax.split(apart[0], sizes, d + 1))
    elif name == "slice":
        ((_, start, stop),) = move.pieces
        results = [
            lax.slice_in_dim(apart[0], start // count, stop // count, axis=d + 1)
        ]
    elif name == "pad":
        low, high, _ = params["padding_config"][d]
        config = [(0, 0, 0)] * apart[0].ndim
        config[d + 1] = low // count, high // count, 0
        results = [lax.pad(apart[0], apart[1], config)]
    else:
        results = [lax.concatenate(apart, d + 1)]
    return [x.reshape(shape) for x, shape in zip(results, shapes, strict=True)]


@dataclass(frozen=True, slots=True)
class Regroup:
    """A reshape between an interleaved dim and dims (parts, rest of each part, …).

    Attributes:
      dim: position of the interleaved dim.
      parts, rest: positions of the dims in the other shape.
      is_split: whether the operand has the interleaved dim; else the result has.
    """

    dim: int
    parts: int
    rest: int
    is_split: bool


def regroup_of(op: Op, marks: Marks) -> Regroup | None:
    """Return how a reshape splits or merges an interleaved dim.

    Returns:
      None where the op is no such reshape.
    """
    if op.name != "reshape" or op.rule is None or len(op.operands) != 1:
        return None
    sides = (op.operands[0], op.rule.operands[0]), (op.results[0], op.rule.results[0])
    sizes = [factor.size for factor in op.rule.factors]
    for (value, layout), (_, other), is_split in (
        (*sides, True),
        (*sides[::-1], False),
    ):
        for d, dim in enumerate(layout):
            blocks = marks.get(DimRef(value, d))
            if blocks is None or len(set(blocks.parts)) > 1 or len(dim) < 2:
                continue
            dims = [e for e, fs in enumerate(other) if fs and set(fs) <= set(dim)]
            held = tuple(f for e in dims for f in other[e])
            if held != dim or len(other[dims[0]]) != 1 or len(dims) < 2:
                continue
            rest = math.prod(sizes[f] for f in other[dims[1]])
            if sizes[dim[0]] == len(blocks.parts) and rest % blocks.count == 0:
                return Regroup(d, dims[0], dims[1], is_split)
    return None


def run_regroup(eqn: Any, move: Regroup, count: int, x: Any) -> Any:
    """Run a reshape in each block.

    Args:
      eqn: its equation.
      move: the interleaved dim, and the dims that it is split into or merged from.
      count: number of blocks.
      x: its operand.
    """
    (out,) = eqn.outvars
    shape = list(out.aval.shape if move.is_split else x.shape)
    a, b = move.parts, move.rest
    # Interleaved: (…, block, part, …, rest of a block, …); split, blocks are the major
    # factor of the rest.
    in_blocks = [*shape[:a], count, *shape[a:b], shape[b] // count, *shape[b + 1 :]]
    if move.is_split:
        return jnp.moveaxis(x.reshape(in_blocks), a, b).reshape(shape)
    apart = [*shape[:b], count, shape[b] // count, *shape[b + 1 :]]
    return jnp.moveaxis(x.reshape(apart), b, a).reshape(out.aval.shape)
