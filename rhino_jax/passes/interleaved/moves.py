"""Ops that take a dim apart or put it together, on dims that are stored in blocks.

A slice, pad, split or concatenation at the bounds of parts is one of every block. A
reshape of `(3 · h · k)` to `(3, h, k)` is one of every block, and puts the blocks into
`h`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import jax.numpy as jnp
from jax import lax

from rhino_jax.ir.blocks import InterleavedOrder
from rhino_jax.ir.program import Op
from rhino_jax.passes.interleaved.links import DimRef
from rhino_jax.passes.interleaved.order import split_shape


Marks = Mapping[DimRef, InterleavedOrder]
"""Dims that are in blocks → how."""


@dataclass(frozen=True, slots=True)
class DimMove:
    """A dim and the parts of it that an op takes, or is given.

    Attributes:
      dim: the dim, of operands and results alike.
      whole: the value that has the whole dim.
      pieces: of every other one: value, and where in the dim it starts and stops.
      is_split: whether the whole is read; else it is made.
    """

    dim: int
    whole: int
    pieces: tuple[tuple[int, int, int], ...]
    is_split: bool


def move_of(op: Op, eqn: Any) -> DimMove | None:
    """What an op moves along one dim, if that is all that it does there; of several
    dims none."""
    name, params = op.name, eqn.params
    if name == "slice":
        return _slice(op, eqn)
    if name == "pad":
        return _pad(op, eqn)
    if name == "split":
        pieces = _following(op.results, params["sizes"])
        return DimMove(params["axis"], op.operands[0], pieces, True)
    if name == "concatenate":
        dim = params["dimension"]
        pieces = _following(op.operands, [v.aval.shape[dim] for v in eqn.invars])
        return DimMove(dim, op.results[0], pieces, False)
    return None


def _following(
    values: Sequence[int], sizes: Sequence[int]
) -> tuple[tuple[int, int, int], ...]:
    sizes = [int(size) for size in sizes]
    stops = list(accumulate(sizes))
    return tuple(
        (v, stop - size, stop)
        for v, size, stop in zip(values, sizes, stops, strict=True)
    )


def _slice(op: Op, eqn: Any) -> DimMove | None:
    starts, stops = eqn.params["start_indices"], eqn.params["limit_indices"]
    strides = eqn.params["strides"] or (1,) * len(starts)
    shape = eqn.invars[0].aval.shape
    cut = [d for d, n in enumerate(shape) if stops[d] - starts[d] != n]
    if len(cut) != 1 or any(s != 1 for s in strides):
        return None
    (d,) = cut
    return DimMove(d, op.operands[0], ((op.results[0], starts[d], stops[d]),), True)


def _pad(op: Op, eqn: Any) -> DimMove | None:
    config = eqn.params["padding_config"]
    cut = [d for d, c in enumerate(config) if tuple(c) != (0, 0, 0)]
    if len(cut) != 1:
        return None
    (d,) = cut
    low, high, inner = config[d]
    if low < 0 or high < 0 or inner:
        return None
    piece = op.operands[0], low, low + eqn.invars[0].aval.shape[d]
    return DimMove(d, op.results[0], (piece,), False)


def pieces_in_blocks(
    move: DimMove, marks: Marks
) -> dict[DimRef, InterleavedOrder] | None:
    """How the pieces of a dim in blocks are stored; None where some piece is no whole
    number of parts, or the dim is as written."""
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
    """A slice, pad, split or concatenation, of every block."""
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
    """A reshape that takes (parts, rest of each, …) out of a dim, or makes one of them.

    Attributes:
      dim: the dim that is in blocks.
      parts, rest: the dims of the other shape.
      is_split: whether the operand has the dim; else the result.
    """

    dim: int
    parts: int
    rest: int
    is_split: bool


def regroup_of(op: Op, marks: Marks) -> Regroup | None:
    """How a reshape takes apart, or makes, a dim that is in blocks."""
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
            rest = 1
            for f in other[dims[1]]:
                rest *= sizes[f]
            if sizes[dim[0]] == len(blocks.parts) and rest % blocks.count == 0:
                return Regroup(d, dims[0], dims[1], is_split)
    return None


def run_regroup(eqn: Any, move: Regroup, count: int, x: Any) -> Any:
    """A reshape, of every block."""
    (out,) = eqn.outvars
    shape = list(out.aval.shape if move.is_split else x.shape)
    a, b = move.parts, move.rest
    # In blocks: (…, block, part, …, rest of a block, …); apart, blocks are major in
    # the rest.
    in_blocks = [*shape[:a], count, *shape[a:b], shape[b] // count, *shape[b + 1 :]]
    if move.is_split:
        return jnp.moveaxis(x.reshape(in_blocks), a, b).reshape(shape)
    apart = [*shape[:b], count, shape[b] // count, *shape[b + 1 :]]
    return jnp.moveaxis(x.reshape(apart), b, a).reshape(out.aval.shape)
