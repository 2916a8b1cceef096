"""Ops that move elements without computing: broadcasts, transposes, slices, pads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
from jax import lax

from rhino_jax.frontend.registry import (
    OpContext,
    OpRule,
    PartFn,
    Shape,
    numbers,
    register,
    result_shape,
)
from rhino_jax.frontend.rules.factors import FactorList, along, dimwise
from rhino_jax.ir.factor import Dim, Rule
from rhino_jax.ir.op import Op
from rhino_jax.ir.traits import FROM_ALL, OpKind, Traits


FROM_FIRST = Traits(OpKind.MOVEMENT, moves=((0,),))


@register(
    "broadcast_in_dim",
    traits=Traits(OpKind.BROADCAST, moves=((0,),)),
    local=result_shape("shape"),
)
def broadcast_in_dim(ctx: OpContext) -> OpRule:
    """Return the rule: new and expanded dims are factors of the result alone."""
    operand_shape, result_shape = ctx.in_shapes[0], ctx.out_shapes[0]
    factors = FactorList()
    result = factors.dims(result_shape)
    operand: list[Dim] = [
        result[d] if size == result_shape[d] else ()
        for size, d in zip(
            operand_shape, ctx.params["broadcast_dimensions"], strict=True
        )
    ]
    sizes = [[()] * len(shape) for shape in ctx.in_shapes[1:]]
    return OpRule(factors.rule([operand, *sizes], [result]), is_fusible=True)


def _part_of_iota(eqn: Any) -> PartFn:
    dtype, dim = eqn.params["dtype"], eqn.params["dimension"]

    def part(operands: Sequence[Any], shape: Shape, positions: Any) -> Any:
        at = positions(dim, np.int32)
        if at is None:
            return lax.broadcasted_iota(dtype, shape, dim)
        return lax.broadcast_in_dim(lax.convert_element_type(at, dtype), shape, (dim,))

    return part


@register("empty", traits=Traits(OpKind.GENERATOR), local=result_shape("shape"))
@register("iota_2x32_shape", traits=Traits(OpKind.GENERATOR))
@register("iota", traits=Traits(OpKind.GENERATOR), part=_part_of_iota)
def made_of_nothing(ctx: OpContext) -> OpRule:
    """Return the rule of ops without array operands: every device generates its own
    part."""
    factors = FactorList()
    layout = factors.dims(ctx.out_shapes[0])
    sizes = [[()] * len(shape) for shape in ctx.in_shapes]
    rule = factors.rule(sizes, [layout] * len(ctx.out_shapes))
    return OpRule(rule, is_fusible=True)


@register(
    "transpose",
    traits=FROM_FIRST,
    label=lambda params: f"to {numbers(params['permutation'])}",
)
def transpose(ctx: OpContext) -> OpRule:
    """Return the rule of a permutation of dims."""
    factors = FactorList()
    operand = factors.dims(ctx.in_shapes[0])
    result = [operand[d] for d in ctx.params["permutation"]]
    return OpRule(factors.rule([operand], [result]), is_fusible=True)


@register("squeeze", "expand_dims", "unstack", traits=FROM_FIRST)
@register("rev", traits=replace(FROM_FIRST, is_reversal=True, dims_param="dimensions"))
@register("stack", traits=Traits(OpKind.MOVEMENT, moves=FROM_ALL))
def along_dims(ctx: OpContext) -> OpRule:
    """Return the rule: dims that are dropped or added, of size one or whole, are so in
    all arrays that have them; reversed dims are whole, since reversing them permutes
    shards."""
    rank = max(map(len, (*ctx.in_shapes, *ctx.out_shapes)))
    dims = ctx.params.get("dimensions") or (ctx.params.get("axis"),)
    rule = along(ctx, {d % rank for d in dims if d is not None})
    return OpRule(rule, is_fusible=ctx.primitive != "stack")


@register(
    "slice",
    traits=FROM_FIRST,
    # Limits by which dims with the part are taken in full; of size 0, nothing.
    local=lambda params, ins, outs: {
        "limit_indices": tuple(
            start + max((size - 1) * stride + 1, 0)
            for (start, stride, _), size in zip(
                _steps_of("slice", params), outs[0], strict=True
            )
        )
    },
)
@register("pad", traits=Traits(OpKind.MOVEMENT, fuses_operands=True, moves=((0, 1),)))
def resized(ctx: OpContext) -> OpRule:
    """Return the rule: dims taken in full are parallel; others are shifts, whether
    slices are in steps or not, and whether padding is negative or comes between
    elements."""
    steps = _steps_of(ctx.primitive, ctx.params)
    is_number = not ctx.out_dtypes[0].startswith(("key<", "bool"))
    rule = dimwise(
        ctx,
        lambda factors, d, size, length: factors.moved(
            length, size, *steps[d], can_sum=is_number or ctx.primitive == "pad"
        ),
    )
    return OpRule(rule, is_fusible=True)


def of_blocks(
    name: str, params: Mapping[str, Any], dim: int, block: int, part: int
) -> Mapping[str, Any] | None:
    """Return the parameters of an op that joins, takes apart, takes or pads blocks
    along a dim, where only a part of every block is present.

    Args:
      name: name of the primitive.
      params: its parameters on whole blocks.
      dim: the dim of its operands and results that consists of blocks.
      block: number of consecutive indices of a block.
      part: number of them that are present.
    Returns:
      None where it is no such op.
    """
    if name == "concatenate":
        return params if params["dimension"] == dim else None
    if name == "split" and params["axis"] == dim:
        known = {"sizes": params["sizes"]}
    elif name == "pad" and not params["padding_config"][dim][2]:
        known = {"padding_config": params["padding_config"][dim]}
    elif name == "slice" and (params["strides"] or {dim: 1})[dim] == 1:
        known = {k: (params[k][dim],) for k in ("start_indices", "limit_indices")}
    else:
        return None
    if any(n % block or n < 0 for sizes in known.values() for n in sizes):
        return None
    parts = {k: tuple(n // block * part for n in sizes) for k, sizes in known.items()}
    if name == "split":
        return {**params, **parts}
    one = {k: parts[k] if name == "pad" else parts[k][0] for k in parts}
    return {
        **params,
        **{k: (*params[k][:dim], x, *params[k][dim + 1 :]) for k, x in one.items()},
    }


def starts_of(primitive: str, params: Mapping[str, Any]) -> list[int | None]:
    """Return, for every dim, the position in the operand of a result's first element.

    Args:
      primitive: "slice" or "pad"; of others nothing is returned.
      params: its parameters.
    Returns:
      Positions, negative where padding comes first; None where the elements are not
      contiguous.
    """
    return [
        start if stride == dilation == 1 else None
        for start, stride, dilation in _steps_of(primitive, params)
    ]


def _steps_of(primitive: str, params: Mapping[str, Any]) -> list[tuple[int, int, int]]:
    """Return `shift`, `stride` and `dilation` of every dim, as in `Factor`; of a
    primitive that is neither "slice" nor "pad", nothing."""
    if primitive == "pad":
        config = params["padding_config"]
        return [(-int(low), 1, between + 1) for low, _, between in config]
    if primitive != "slice":
        return []
    starts = params["start_indices"]
    strides = params["strides"] or (1,) * len(starts)
    return [(int(s), step, 1) for s, step in zip(starts, strides, strict=True)]


@dataclass(frozen=True, slots=True)
class DimMove:
    """A slice, pad, split or concatenation, which reads or writes parts of one dim.

    Attributes:
      dim: position of the dim, in operands and results alike.
      whole: id of the value with the whole dim.
      pieces: (value id, start, stop) of each other value: its range in the whole dim.
      is_split: whether the op reads the whole dim; else it writes it.
    """

    dim: int
    whole: int
    pieces: tuple[tuple[int, int, int], ...]
    is_split: bool


def move_of(op: Op, eqn: Any) -> DimMove | None:
    """Return the parts of one dim that an op reads or writes.

    Args:
      op: the op.
      eqn: its equation.
    Returns:
      None where it is no slice, pad, split or concatenation, or one along several dims.
    """
    name, params = op.name, eqn.params
    if name in ("slice", "pad"):
        return _window(op, eqn)
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
    """Return (value id, start, stop) of adjacent parts."""
    sizes = [int(size) for size in sizes]
    stops = list(accumulate(sizes))
    return tuple(
        (v, stop - size, stop)
        for v, size, stop in zip(values, sizes, stops, strict=True)
    )


def _window(op: Op, eqn: Any) -> DimMove | None:
    """Return the part of one dim that a slice takes, or that a pad puts elsewhere."""
    starts = starts_of(op.name, eqn.params)
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    cut = [d for d, start in enumerate(starts) if start or before[d] != after[d]]
    if len(cut) != 1 or None in starts:
        return None
    (d,) = cut
    start = int(starts[d] or 0)
    if op.name == "slice":
        piece = op.results[0], start, start + after[d]
        return DimMove(d, op.operands[0], (piece,), True)
    if start > 0 or before[d] - start > after[d]:
        return None  # negative padding
    return DimMove(
        d, op.results[0], ((op.operands[0], -start, before[d] - start),), False
    )


@register(
    "concatenate",
    traits=Traits(
        OpKind.MOVEMENT,
        fuses_operands=True,
        masks_padding=True,
        moves=FROM_ALL,
        dims_param="dimension",
    ),
)
def concatenate(ctx: OpContext) -> OpRule:
    """Return the rule: the dim of concatenation is whole, unless one operand is most of
    it.

    That operand, such as a grid between its borders, is shifted, and the others are
    read whole.
    """
    axis = ctx.params["dimension"]
    sizes = [shape[axis] for shape in ctx.in_shapes]
    main = max(range(len(sizes)), key=sizes.__getitem__)
    is_most = 2 * sizes[main] > ctx.out_shapes[0][axis] > sizes[main]
    return OpRule(_joined(ctx, axis, main if is_most else None))


@register(
    "split",
    traits=replace(FROM_FIRST, dims_param="axis"),
    local=lambda params, ins, outs: {
        "sizes": tuple(shape[params["axis"]] for shape in outs)
    },
)
def split(ctx: OpContext) -> OpRule:
    """Return the rule: the dim that is split is whole."""
    return OpRule(_joined(ctx, ctx.params["axis"]), is_fusible=True)


def _joined(ctx: OpContext, axis: int, main: int | None = None) -> Rule:
    """Return the rule of operands and results that agree in all dims but `axis`, which
    is whole, or a shift between the result and the operand number `main`."""
    shapes, count = (*ctx.in_shapes, *ctx.out_shapes), len(ctx.in_shapes)
    factors, shared = FactorList(), list[Dim]()
    moved: Dim = ()
    for d, size in enumerate(shapes[-1]):
        if d != axis:
            shared.append(factors.parallel(size))
            continue
        if main is not None:
            start = -sum(shape[d] for shape in shapes[:main])
            moved = factors.moved(size, shapes[main][d], start)[1]
        shared.append(moved)
    layouts = [
        [*shared[:axis], factors.whole(shape[axis]), *shared[axis + 1 :]]
        if main is None or i not in (main, count)
        else shared
        for i, shape in enumerate(shapes)
    ]
    return factors.rule(layouts[:count], layouts[count:])


@register(
    "tile",
    traits=FROM_FIRST,
    local=lambda params, ins, outs: {
        "reps": tuple(n // part for n, part in zip(outs[0], ins[0], strict=True))
    },
)
def tile(ctx: OpContext) -> OpRule:
    """Return the rule: a repeated dim is (copies, dim), major first."""
    (shape,) = ctx.in_shapes
    factors = FactorList()
    operand = factors.dims(shape)
    result = [
        factors.parallel(copies) + dim
        for copies, dim in zip(ctx.params["reps"], operand, strict=True)
    ]
    return OpRule(factors.rule([operand], [result]), is_fusible=True)
