"""Ops that split, join or reshape dims in interleaved storage.

A slice, pad, split or concatenation at the bounds of parts is done in each block. A
reshape of `(3 · h · k)` to `(3, h, k)` is one in each block, and interleaves `h`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from rhino_jax.frontend.rules.shape import DimMove
from rhino_jax.ir.program import Op
from rhino_jax.ir.transform import InterleavedOrder
from rhino_jax.passes.interleaved.order import split_shape


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
            rest = 1
            for f in other[dims[1]]:
                rest *= sizes[f]
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
