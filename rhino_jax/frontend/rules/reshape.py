"""Reshapes: operand and result dims as products of common factors.

`(6, 4) -> (24,)` is `a b -> (a b)`, `(4, 6) -> (8, 3)` is `a (b c) -> (a b) c`: a
sharding of `a` survives either. Where the dims have no common refinement, as in
`(4, 6) -> (6, 4)`, they share the common factor at the major side (2), and the rest of
them is whole: `(a b!) _ -> (a c!) _`.
"""

from __future__ import annotations

import math
from dataclasses import replace

from rhino_jax.frontend.registry import OpContext, OpRule, register, result_shape
from rhino_jax.frontend.rules.factors import FactorList
from rhino_jax.ir.factor import Dim, Rule
from rhino_jax.ir.traits import OpKind, Traits


@register(
    "reshape",
    traits=Traits(OpKind.MOVEMENT, moves=((0,),)),
    local=result_shape("new_sizes"),
)
def reshape(ctx: OpContext) -> OpRule:
    """Return the rule of splits and merges of dims, after the permutation by
    `dimensions`."""
    (shape,), (new_shape,) = ctx.in_shapes, ctx.out_shapes
    order = ctx.params.get("dimensions")
    if order is None:
        return OpRule(reshape_rule(shape, new_shape), is_fusible=True)
    rule = reshape_rule(tuple(shape[d] for d in order), new_shape)
    operand = tuple(rule.operands[0][order.index(d)] for d in range(len(shape)))
    return OpRule(replace(rule, operands=(operand,)), is_fusible=True)


def reshape_rule(operand: tuple[int, ...], result: tuple[int, ...]) -> Rule:
    """Return the factors that two shapes of the same number of elements have in
    common."""
    factors = FactorList()
    left: list[Dim] = [()] * len(operand)
    right: list[Dim] = [()] * len(result)
    if 0 not in operand:
        for ins, outs in _blocks(operand, result):
            dims_in, dims_out = _refine(
                factors, [operand[d] for d in ins], [result[d] for d in outs]
            )
            for d, dim in zip(ins, dims_in, strict=True):
                left[d] = dim
            for d, dim in zip(outs, dims_out, strict=True):
                right[d] = dim
    return factors.rule([left], [right])


def _blocks(
    operand: tuple[int, ...], result: tuple[int, ...]
) -> list[tuple[list[int], list[int]]]:
    """Return the shortest runs of dims (size one left out) with equal products, in
    order."""
    blocks: list[tuple[list[int], list[int]]] = []
    lefts = [d for d, size in enumerate(operand) if size != 1]
    rights = [d for d, size in enumerate(result) if size != 1]
    while lefts and rights:
        ins, outs = [lefts.pop(0)], [rights.pop(0)]
        a, b = operand[ins[0]], result[outs[0]]
        while a != b:
            if a < b:
                ins.append(lefts.pop(0))
                a *= operand[ins[-1]]
            else:
                outs.append(rights.pop(0))
                b *= result[outs[-1]]
        blocks.append((ins, outs))
    return blocks


def _refine(
    factors: FactorList, operand: list[int], result: list[int]
) -> tuple[list[Dim], list[Dim]]:
    """Split common factors off a block's dims, from the major side, while there are
    any.

    Args:
      factors: extended by the new factors.
      operand, result: sizes of the dims of the block, with equal products.
    """
    left: list[Dim] = [()] * len(operand)
    right: list[Dim] = [()] * len(result)
    i = j = 0
    a, b = operand[0], result[0]
    while True:
        common = math.gcd(a, b)
        is_refined = common in (a, b)
        dim = factors.parallel(common)
        left[i] += dim
        right[j] += dim
        a, b = a // common, b // common
        if not is_refined:
            break
        if a == 1:
            i += 1
            if i == len(operand):
                return left, right
            a = operand[i]
        if b == 1:
            j += 1
            b = result[j]
    left[i] += factors.whole(a) if left[i] else ()
    right[j] += factors.whole(b) if right[j] else ()
    return left, right
