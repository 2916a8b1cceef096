"""Random numbers: keys, and bits of which every shard draws its part.

Threefry bits are a function of key and position (`jax_threefry_partitionable`, on by
default), so any of their dims may be sharded. Other generators run in sequence.
`random_seed`, `random_fold_in`, `random_clone` and the counter-based generators
themselves are elementwise.
"""

from __future__ import annotations

import math

from rhino_jax.frontend.registry import OpContext, OpRule, register
from rhino_jax.frontend.rules.factors import FactorList
from rhino_jax.frontend.rules.opaque import uncut
from rhino_jax.ir.factor import Dim
from rhino_jax.ir.traits import OpKind, Traits


FLOPS_PER_WORD = 80.0
"""Integer operations of a random 32-bit word: 20 rounds of threefry2x32, of four
operations on a pair of words each, yield two words; with key schedule and
conversions about twice that.

Source: Salmon et al., Parallel random numbers: as easy as 1, 2, 3, SC 2011.
"""

GAMMA_FLOPS = 2000.0
"""Operations per gamma sample: about 20 words (rejection, Marsaglia and Tsang)."""


@register("random_bits", traits=Traits(OpKind.GENERATOR, is_expensive=True))
@register("random_split", traits=Traits(OpKind.GENERATOR))
def bits(ctx: OpContext) -> OpRule:
    """Return the rule of drawn bits: dims of keys come first, the other dims are the
    result's alone."""
    (keys,), (shape,) = ctx.in_shapes, ctx.out_shapes
    factors = FactorList()
    is_free = "fry" in ctx.in_dtypes[0]
    result = [
        factors.parallel(size) if is_free or d < len(keys) else factors.whole(size)
        for d, size in enumerate(shape)
    ]
    rule = factors.rule([result[: len(keys)]], [result])
    return OpRule(rule, FLOPS_PER_WORD * math.prod(shape), is_fusible=is_free)


@register("random_wrap", "random_unwrap", traits=Traits(OpKind.IDENTITY))
def wrap(ctx: OpContext) -> OpRule:
    """Return the rule of keys and their words: the words of a key are whole."""
    (operand_shape,), (result_shape,) = ctx.in_shapes, ctx.out_shapes
    rank = min(len(operand_shape), len(result_shape))
    factors = FactorList()
    keys: list[Dim] = [factors.parallel(size) for size in operand_shape[:rank]]
    operand = keys + [factors.whole(size) for size in operand_shape[rank:]]
    result = keys + [factors.whole(size) for size in result_shape[rank:]]
    return OpRule(factors.rule([operand], [result]), is_fusible=True)


@register("random_gamma", traits=Traits(OpKind.GENERATOR))
def random_gamma(ctx: OpContext) -> OpRule:
    """Return the rule: samples are independent; keys have the parameter's leading
    dims."""
    keys, shape = ctx.in_shapes
    factors = FactorList()
    layout = [factors.parallel(size) for size in shape]
    rule = factors.rule([layout[: len(keys)], layout], [layout])
    return OpRule(rule, GAMMA_FLOPS * math.prod(shape))


@register("rng_bit_generator", "rng_uniform", traits=Traits(OpKind.GENERATOR))
def sequential(ctx: OpContext) -> OpRule:
    """Return the rule of a generator that runs in sequence: every device draws
    everything."""
    flops = FLOPS_PER_WORD * math.prod(ctx.out_shapes[-1])
    return OpRule(uncut(ctx).rule, flops)
