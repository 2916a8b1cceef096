"""Windowed reductions, their gradients and tangents: pooling."""

from __future__ import annotations

import math

from rhino_jax.frontend.registry import OpContext, OpRule, register
from rhino_jax.frontend.rules.factors import FactorList
from rhino_jax.ir.factor import Dim
from rhino_jax.ir.traits import OpKind, Traits


def _traits(name: str) -> Traits:
    reducer = name.removeprefix("reduce_window").removeprefix("_")
    return Traits(
        OpKind.REDUCTION,
        masks_padding=True,
        linear=((0,),) if reducer == "sum" else (),
        reducer=reducer,
    )


@register(
    "reduce_window",
    "reduce_window_sum",
    "reduce_window_max",
    "reduce_window_min",
    traits=_traits,
)
@register("select_and_gather_add", traits=Traits(OpKind.REDUCTION, linear=((0,),)))
def reduce_window(ctx: OpContext) -> OpRule:
    """Return the rule: dims with windows of one element are parallel, others halo or
    whole.

    A dim can be sharded where each shard of the operand starts `stride` times as far in
    as its shard of the result: in = stride · out. Windows of shard i then reach
    `pad_lo` elements below it, and (window - 1) · dilation + 1 - stride - pad_lo above.
    Windows that neither overlap nor are padded split the dim into (out, stride), of
    which `out` is parallel. The generic `reduce_window` has initial values as further
    operands, which are scalars.
    """
    params = ctx.params
    in_shape, out_shape = ctx.in_shapes[0], ctx.out_shapes[0]
    factors = FactorList()
    operand: list[Dim] = []
    result: list[Dim] = []
    for d, (size, length) in enumerate(zip(in_shape, out_shape, strict=True)):
        low, high = params["padding"][d]
        outer, inner = _window_dim(
            factors,
            size,
            length,
            params["window_dimensions"][d],
            params["window_strides"][d],
            (low, high),
            params.get("base_dilation", (1,) * len(in_shape))[d],
            params.get("window_dilation", (1,) * len(in_shape))[d],
        )
        operand.append(outer + inner)
        result.append(outer)
    operands = [operand if shape else [] for shape in ctx.in_shapes]
    flops = float(math.prod(out_shape) * math.prod(params["window_dimensions"]))
    return OpRule(factors.rule(operands, [result] * len(ctx.out_shapes)), flops)


def _window_dim(
    factors: FactorList,
    size: int,
    length: int,
    window: int,
    stride: int,
    padding: tuple[int, int],
    base_dilation: int,
    window_dilation: int,
) -> tuple[Dim, Dim]:
    """Return the factors of one dim: those that the result has too, and the others."""
    low, high = padding
    extent = (window - 1) * window_dilation + 1
    if size != stride * length or base_dilation != 1 or low < 0 or high < 0:
        return (), factors.whole(size)
    if extent <= stride and low == 0:
        return factors.parallel(length), factors.whole(stride)
    return factors.halo(length, low, max(extent - stride - low, 0)), ()


@register("select_and_scatter", traits=Traits(OpKind.SCATTER))
@register("select_and_scatter_add", traits=Traits(OpKind.SCATTER, linear=((0,),)))
def select_and_scatter_add(ctx: OpContext) -> OpRule:
    """Return the rule of the gradient of max pooling: sharded where windows do not
    overlap.

    Then each window of the operand has its own element of the source's dim, and the dim
    is (source, stride). Where windows overlap, several of them write an element, and
    the dim is whole.
    """
    params = ctx.params
    # select_and_scatter_add: (source, operand); the generic op: (operand, source,
    # initial value).
    is_generic = ctx.primitive == "select_and_scatter"
    operand_shape, source_shape = ctx.in_shapes[0], ctx.in_shapes[1]
    if not is_generic:
        operand_shape, source_shape = source_shape, operand_shape
    factors = FactorList()
    operand: list[Dim] = []
    source: list[Dim] = []
    for d, (size, length) in enumerate(zip(operand_shape, source_shape, strict=True)):
        stride = params["window_strides"][d]
        is_apart = (
            params["window_dimensions"][d] <= stride
            and tuple(params["padding"][d]) == (0, 0)
            and size == stride * length
        )
        outer = factors.parallel(length) if is_apart else ()
        inner = factors.whole(stride if is_apart else size)
        operand.append(outer + inner)
        source.append(outer)
    operands = [operand, source, []] if is_generic else [source, operand]
    flops = float(math.prod(source_shape) * math.prod(params["window_dimensions"]))
    return OpRule(factors.rule(operands, [operand]), flops)
