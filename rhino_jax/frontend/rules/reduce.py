"""Reductions, arg-reductions, running sums; sorting and top-k; windowed reductions
(pooling), their gradients and tangents.

A sorted dim is whole, top-k results of shards are merged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from jax import lax

from rhino_jax.frontend import registry
from rhino_jax.frontend.registry import OpContext, OpRule, numbers, register
from rhino_jax.frontend.rules.factors import FactorList, along, dimwise
from rhino_jax.ir.factor import Dim
from rhino_jax.ir.op import item_bytes
from rhino_jax.ir.traits import Library, OpKind, Traits


REDUCERS = {f"reduce_{word}": word for word in registry.REDUCERS}

COMBINE: Mapping[str, Callable[[Any, Any], Any]] = {
    "sum": lax.add,
    "mean": lax.add,
    "prod": lax.mul,
    "max": lax.max,
    "min": lax.min,
    "and": lax.bitwise_and,
    "or": lax.bitwise_or,
}
"""Reducer → its binary op; that of means is of parts weighted by their share."""


def identity(reducer: str, dtype: Any) -> Any:
    """Return the identity element of a reducer."""
    if reducer in ("sum", "or", "xor"):
        return np.zeros((), dtype)
    if reducer == "prod":
        return np.ones((), dtype)
    if reducer == "and":
        return ~np.zeros((), dtype)
    assert reducer in ("max", "min"), f"{reducer} leaves nothing as it is"
    is_max = reducer == "max"
    if dtype == np.bool_:
        return np.asarray(not is_max)
    if np.issubdtype(dtype, np.integer):
        info = np.iinfo(dtype)
        return np.asarray(info.min if is_max else info.max, dtype)
    return np.asarray(-np.inf if is_max else np.inf).astype(dtype)


POSITIONS = ("argmax", "argmin")


@register(
    *REDUCERS,
    *POSITIONS,
    "reduce_xor",
    traits=lambda name: Traits(
        OpKind.REDUCTION,
        fuses_operands=True,
        masks_padding=True,
        linear=((0,),) if name == "reduce_sum" else (),
        zeros=() if name in POSITIONS else ((0,),),
        reducer=name.removeprefix("reduce_") if name not in POSITIONS else "",
        dims_param="axes",
    ),
    label=lambda params: f"over {numbers(params['axes'])}",
)
def reduce_dims(ctx: OpContext) -> OpRule:
    """Return the rule of a reduction: reduced dims leave partial results, which a
    collective combines.

    Positions of maxima and minima are merged together with their values; where neither
    is possible, the reduced dims are whole.
    """
    merged = (ctx.in_dtypes[0], *ctx.out_dtypes) if ctx.primitive in POSITIONS else ()
    return _reduced(ctx, ctx.params["axes"], REDUCERS.get(ctx.primitive), merged)


@register("reduce", traits=Traits(OpKind.REDUCTION, fuses_operands=True))
def reduce_any(ctx: OpContext) -> OpRule:
    """Return the rule of a reduction by an arbitrary function: reduced dims are
    whole."""
    return _reduced(ctx, ctx.params["dimensions"], None)


def _reduced(
    ctx: OpContext,
    axes: Collection[int],
    reducer: str | None,
    merged: Sequence[str] = (),
) -> OpRule:
    """Return the rule of a reduction.

    Args:
      ctx: the op.
      axes: positions of the dims that are reduced.
      reducer: how partial results combine; None where no collective combines them.
      merged: element types of the arrays that shards send, for results that are merged.
    """

    def reduced(factors: FactorList, size: int) -> Dim:
        if merged and len(axes) == 1:
            return factors.merge(size, 1, merged)
        return factors.reduce(size, reducer) if reducer else factors.whole(size)

    return OpRule(along(ctx, axes, reduced), float(math.prod(ctx.in_shapes[0])))


@register("cumsum", traits=Traits(linear=((0,),), dims_param="axis"))
@register(
    "cumprod", "cummax", "cummin", "cumlogsumexp", traits=Traits(dims_param="axis")
)
def cumulative(ctx: OpContext) -> OpRule:
    """Return the rule of a running sum: along its dim, a shard sends its last sum to
    those after it."""
    merged = partial(FactorList.merge, items=1, dtypes=ctx.out_dtypes)
    rule = along(ctx, (ctx.params["axis"],), merged)
    return OpRule(rule, float(math.prod(ctx.in_shapes[0])))


@register("sort", traits=Traits(OpKind.OTHER, dims_param="dimension"))
def sort(ctx: OpContext) -> OpRule:
    """Return the rule: operands, sorted together by the first `num_keys`, have one
    shape."""
    shape = ctx.in_shapes[0]
    axis = ctx.params["dimension"] % max(len(shape), 1)
    flops = math.prod(shape) * math.log2(max(shape[axis], 2))
    return OpRule(along(ctx, (axis,)), flops, traits=_sorting(ctx))


def _sorting(ctx: OpContext) -> Traits:
    """Return the traits of an op that sorts its first operand."""
    library = Library("sorting", item_bytes(ctx.in_dtypes[0]))
    return replace(registry.traits_of(ctx.primitive), library=library)


@register("approx_top_k", traits=Traits(OpKind.OTHER))
@register("top_k", traits=Traits(OpKind.OTHER, is_gathered=True, dims_param="axis"))
def top_k(ctx: OpContext) -> OpRule:
    """Return the rule of the k largest along one dim: values and their positions in the
    whole dim."""
    (shape,) = ctx.in_shapes
    axis = ctx.params.get("axis", ctx.params.get("reduction_dimension", -1))
    axis %= len(shape)
    k = ctx.params["k"]
    merged = (
        partial(FactorList.merge, items=k, dtypes=ctx.out_dtypes)
        if ctx.params.get("aggregate_to_topk", True)
        else FactorList.whole
    )
    rule = dimwise(
        ctx,
        lambda factors, d, size, length: (
            (merged(factors, size), ()) if d == axis else factors.same(size)
        ),
    )
    return OpRule(rule, math.prod(shape) * math.log2(max(k, 2)), traits=_sorting(ctx))


@register(
    "reduce_window",
    "reduce_window_sum",
    "reduce_window_max",
    "reduce_window_min",
    traits=lambda name: Traits(
        OpKind.REDUCTION,
        masks_padding=True,
        linear=((0,),) if name == "reduce_window_sum" else (),
        reducer=name.removeprefix("reduce_window").removeprefix("_"),
    ),
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
    window = math.prod(ctx.params["window_dimensions"])
    rule = dimwise(ctx, partial(_window_dim, ctx.params))
    return OpRule(rule, float(math.prod(ctx.out_shapes[0]) * window))


def _window_dim(
    params: Mapping[str, Any], factors: FactorList, d: int, size: int, length: int
) -> tuple[Dim, Dim]:
    low, high = params["padding"][d]
    window, stride = params["window_dimensions"][d], params["window_strides"][d]
    base, between = (
        params[key][d] if key in params else 1
        for key in ("base_dilation", "window_dilation")
    )
    extent = (window - 1) * between + 1
    if size != stride * length or base != 1 or low < 0 or high < 0:
        return factors.whole(size), ()
    if extent <= stride and low == 0:
        outer = factors.parallel(length)
        return outer + factors.whole(stride), outer
    return (factors.halo(length, low, max(extent - stride - low, 0)),) * 2


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
    shapes = ctx.in_shapes[:2] if is_generic else ctx.in_shapes[::-1]
    factors = FactorList()

    def dims(d: int, size: int, length: int) -> tuple[Dim, Dim]:
        stride = params["window_strides"][d]
        is_apart = (
            params["window_dimensions"][d] <= stride
            and tuple(params["padding"][d]) == (0, 0)
            and size == stride * length
        )
        outer = factors.parallel(length) if is_apart else ()
        return outer + factors.whole(stride if is_apart else size), outer

    operand, source = factors.pairs(shapes[0], shapes[1], dims)
    operands = [operand, source, []] if is_generic else [source, operand]
    flops = float(math.prod(shapes[1]) * math.prod(params["window_dimensions"]))
    return OpRule(factors.rule(operands, [operand]), flops)
