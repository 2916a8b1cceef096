"""Random numbers: keys, and bits of which every shard draws its part.

Threefry bits are a function of key and position (`jax_threefry_partitionable`, on by
default), so any of their dims may be sharded. Other generators run in sequence.
`random_seed`, `random_fold_in`, `random_clone` and the counter-based generators
themselves are elementwise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from rhino_jax._compat import key_words, threefry_words
from rhino_jax.frontend.registry import (
    OpContext,
    OpRule,
    PartFn,
    Shape,
    register,
    result_shape,
)
from rhino_jax.frontend.rules.factors import FactorList
from rhino_jax.frontend.rules.opaque import unsharded
from rhino_jax.ir.traits import OpKind, Traits


FLOPS_PER_WORD = 80.0
"""Integer operations of a random 32-bit word: 20 rounds of threefry2x32, of four
operations on a pair of words each, yield two words; with key schedule and
conversions about twice that.

Source: Salmon et al., Parallel random numbers: as easy as 1, 2, 3, SC 2011.
"""

GAMMA_FLOPS = 2000.0
"""Operations per gamma sample: about 20 words (rejection, Marsaglia and Tsang)."""


def _part_of_bits(eqn: Any) -> PartFn | None:
    """Return how bits are drawn by position; None where words are not functions of the
    key and their position."""
    key, drawn = eqn.invars[0].aval, eqn.outvars[0].aval
    is_small = math.prod(drawn.shape) < 2**32
    is_free = bool(jax.config.values["jax_threefry_partitionable"])
    if not is_free or not is_small or key.shape or str(key.dtype) != "key<fry>":
        return None

    def part(operands: Sequence[Any], shape: Shape, positions: Any) -> Any:
        at, step = jnp.zeros(shape, jnp.uint32), 1
        for d in reversed(range(len(shape))):
            along = positions(d, jnp.uint32)
            along = lax.iota(jnp.uint32, shape[d]) if along is None else along
            counted = along * jnp.asarray(step, jnp.uint32)
            at = at + lax.broadcast_in_dim(counted, shape, (d,))
            step *= drawn.shape[d]
        return threefry_words(key_words(operands[0]), at, drawn.dtype)

    return part


@register(
    "random_bits",
    traits=Traits(OpKind.GENERATOR, is_expensive=True),
    local=result_shape("shape", is_appended=True),
    part=_part_of_bits,
)
@register(
    "random_split",
    traits=Traits(OpKind.GENERATOR),
    local=result_shape("shape", is_appended=True),
)
def bits(ctx: OpContext) -> OpRule:
    """Return the rule of drawn bits: dims of keys come first, the other dims are the
    result's alone."""
    (keys,), (shape,) = ctx.in_shapes, ctx.out_shapes
    factors = FactorList()
    is_free = "fry" in ctx.in_dtypes[0]
    result = factors.dims(shape, () if is_free else range(len(keys), len(shape)))
    rule = factors.rule([result[: len(keys)]], [result])
    return OpRule(rule, FLOPS_PER_WORD * math.prod(shape), is_fusible=is_free)


@register("random_gamma", traits=Traits(OpKind.GENERATOR))
def random_gamma(ctx: OpContext) -> OpRule:
    """Return the rule: samples are independent; keys have the parameter's leading
    dims."""
    keys, shape = ctx.in_shapes
    factors = FactorList()
    layout = factors.dims(shape)
    rule = factors.rule([layout[: len(keys)], layout], [layout])
    return OpRule(rule, GAMMA_FLOPS * math.prod(shape))


@register("rng_bit_generator", "rng_uniform", traits=Traits(OpKind.GENERATOR))
def sequential(ctx: OpContext) -> OpRule:
    """Return the rule of a generator that runs in sequence: every device draws
    everything."""
    flops = FLOPS_PER_WORD * math.prod(ctx.out_shapes[-1])
    return OpRule(unsharded(ctx).rule, flops)
