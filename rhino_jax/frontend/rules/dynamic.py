"""Dynamic slices and updates: positions that are known at run time only."""

from __future__ import annotations

from rhino_jax.frontend.registry import OpContext, OpRule, register, result_shape
from rhino_jax.frontend.rules.factors import FactorList
from rhino_jax.ir.factor import Dim
from rhino_jax.ir.traits import OpKind, Traits


@register(
    "dynamic_slice",
    traits=Traits(OpKind.MOVEMENT, moves=((0,),)),
    local=result_shape("slice_sizes"),
)
def dynamic_slice(ctx: OpContext) -> OpRule:
    """Return the rule: dims taken in full are parallel; along sliced dims the operand
    is whole, and each device may take its own part of the slice."""
    operand_shape, *starts = ctx.in_shapes
    (result_shape,) = ctx.out_shapes
    factors = FactorList()
    operand: list[Dim] = []
    result: list[Dim] = []
    for size, length in zip(operand_shape, result_shape, strict=True):
        is_full = size == length
        operand.append(factors.parallel(size) if is_full else factors.whole(size))
        result.append(operand[-1] if is_full else factors.parallel(length))
    rule = factors.rule([operand, *([()] * len(starts))], [result])
    return OpRule(rule, is_fusible=True)


@register(
    "dynamic_update_slice",
    traits=Traits(OpKind.UPDATE, fuses_operands=True, moves=((0, 1),)),
)
def dynamic_update_slice(ctx: OpContext) -> OpRule:
    """Return the rule: dims updated in full are parallel, those of one-element updates
    INDEX.

    An update of one element falls into one shard, and the others leave theirs unchanged
    (a KV cache that is sharded along the sequence is written this way, without
    communication). Longer updates may straddle shards, and are whole.
    """
    operand_shape, update_shape, *starts = ctx.in_shapes
    factors = FactorList()
    operand: list[Dim] = []
    update: list[Dim] = []
    for size, length in zip(operand_shape, update_shape, strict=True):
        if size == length:
            operand.append(factors.parallel(size))
        elif length == 1:
            operand.append(factors.index(size))
        else:
            operand.append(factors.whole(size))
        update.append(operand[-1] if size == length else ())
    rule = factors.rule([operand, update, *([()] * len(starts))], [operand])
    return OpRule(rule)
