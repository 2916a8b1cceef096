"""Collectives over a named axis, in the body of manually partitioned code
(`shard_map`).

Sharding here is along other axes of the mesh. The bytes that these collectives send do
not follow from factors: see `rhino_jax.frontend.manual`.
"""

from __future__ import annotations

from rhino_jax.frontend.registry import OpContext, OpRule, register
from rhino_jax.frontend.rules.factors import FactorList
from rhino_jax.frontend.rules.opaque import uncut
from rhino_jax.ir.traits import OpKind, Traits


@register("axis_index", traits=Traits(OpKind.OTHER))
def axis_index(ctx: OpContext) -> OpRule:
    """Return the rule of a scalar: nothing to shard."""
    return uncut(ctx)


@register("ppermute", traits=Traits(OpKind.MOVEMENT))
@register("psum", "psum_invariant", "pmax", "pmin", traits=Traits(OpKind.OTHER))
def in_place(ctx: OpContext) -> OpRule:
    """Return the rule of ops that combine, or move, elements at the same position on
    all devices."""
    if ctx.in_shapes != ctx.out_shapes:
        return uncut(ctx)
    factors = FactorList()
    layouts = [[factors.parallel(size) for size in shape] for shape in ctx.in_shapes]
    return OpRule(factors.rule(layouts, layouts))
