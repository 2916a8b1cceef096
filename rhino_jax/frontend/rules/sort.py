"""Sorting and top-k: a sorted dim is whole, top-k results of shards are merged; all
other dims are parallel."""

from __future__ import annotations

import math

from rhino_jax.frontend.registry import OpContext, OpRule, register
from rhino_jax.frontend.rules.factors import FactorList
from rhino_jax.ir.factor import Dim
from rhino_jax.ir.traits import OpKind, Traits


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
