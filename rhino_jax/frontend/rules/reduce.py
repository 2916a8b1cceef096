"""Reductions, arg-reductions, running sums; sorting and top-k.

A sorted dim is whole, top-k results of shards are merged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
from jax import lax

from rhino_jax.frontend.registry import OpContext, OpRule, register
from rhino_jax.frontend.rules.factors import FactorList
from rhino_jax.ir.factor import Dim
from rhino_jax.ir.traits import OpKind, Traits


REDUCERS = {
    "reduce_sum": "sum",
    "reduce_max": "max",
    "reduce_min": "min",
    "reduce_prod": "prod",
    "reduce_and": "and",
    "reduce_or": "or",
}

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


def _traits(name: str) -> Traits:
    return Traits(
        OpKind.REDUCTION,
        fuses_operands=True,
        masks_padding=True,
        linear=((0,),) if name == "reduce_sum" else (),
        zeros=() if name in POSITIONS else ((0,),),
        reducer=name.removeprefix("reduce_") if name not in POSITIONS else "",
        dims_param="axes",
    )


@register(*REDUCERS, *POSITIONS, "reduce_xor", traits=_traits)
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
    shape = ctx.in_shapes[0]
    factors = FactorList()
    operand: list[Dim] = []
    for d, size in enumerate(shape):
        if d not in axes:
            operand.append(factors.parallel(size))
        elif merged and len(axes) == 1:
            operand.append(factors.merge(size, 1, merged))
        else:
            operand.append(
                factors.reduce(size, reducer) if reducer else factors.whole(size)
            )
    result = [dim for d, dim in enumerate(operand) if d not in axes]
    # `reduce` has as many scalar start values as arrays.
    operands = [operand if other else [] for other in ctx.in_shapes]
    rule = factors.rule(operands, [result] * len(ctx.out_shapes))
    return OpRule(rule, float(math.prod(shape)))


@register("cumsum", traits=Traits(linear=((0,),), dims_param="axis"))
@register(
    "cumprod", "cummax", "cummin", "cumlogsumexp", traits=Traits(dims_param="axis")
)
def cumulative(ctx: OpContext) -> OpRule:
    """Return the rule of a running sum: along its dim, a shard sends its last sum to
    those after it."""
    (shape,) = ctx.in_shapes
    factors = FactorList()
    layout = [
        factors.merge(size, 1, ctx.out_dtypes)
        if d == ctx.params["axis"]
        else factors.parallel(size)
        for d, size in enumerate(shape)
    ]
    return OpRule(factors.rule([layout], [layout]), float(math.prod(shape)))


@register("sort", traits=Traits(OpKind.OTHER, dims_param="dimension"))
def sort(ctx: OpContext) -> OpRule:
    """Return the rule: operands, sorted together by the first `num_keys`, have one
    shape."""
    shape = ctx.in_shapes[0]
    axis = ctx.params["dimension"] % max(len(shape), 1)
    factors = FactorList()
    layout = factors.dims(shape, (axis,))
    rule = factors.rule([layout] * len(ctx.in_shapes), [layout] * len(ctx.out_shapes))
    return OpRule(rule, math.prod(shape) * math.log2(max(shape[axis], 2)))


@register("approx_top_k", traits=Traits(OpKind.OTHER))
@register("top_k", traits=Traits(OpKind.OTHER, is_gathered=True, dims_param="axis"))
def top_k(ctx: OpContext) -> OpRule:
    """Return the rule of the k largest along one dim: values and their positions in the
    whole dim."""
    (shape,) = ctx.in_shapes
    axis = ctx.params.get("axis", ctx.params.get("reduction_dimension", -1))
    axis %= len(shape)
    k = ctx.params["k"]
    factors = FactorList()
    operand: list[Dim] = []
    result: list[Dim] = []
    for d, size in enumerate(shape):
        if d != axis:
            operand.append(factors.parallel(size))
        elif ctx.params.get("aggregate_to_topk", True):
            operand.append(factors.merge(size, k, ctx.out_dtypes))
        else:
            operand.append(factors.whole(size))
        result.append(() if d == axis else operand[-1])
    rule = factors.rule([operand], [result] * len(ctx.out_shapes))
    return OpRule(rule, math.prod(shape) * math.log2(max(k, 2)))
