"""Collectives over an axis that code names itself (`shard_map`), in its body.

Cut is here along other axes of the mesh. What these send is not told by factors: see
`rhino_jax.frontend.manual`.
"""

from __future__ import annotations

from rhino_jax.frontend.registry import OpContext, OpRule, register
from rhino_jax.frontend.rules.factors import FactorList
from rhino_jax.frontend.rules.opaque import uncut
from rhino_jax.ir.traits import OpKind, Traits


@register("axis_index", traits=Traits(OpKind.OTHER))
def axis_index(ctx: OpContext) -> OpRule:
    """A scalar."""
    return uncut(ctx)


@register("ppermute", traits=Traits(OpKind.MOVEMENT))
@register("psum", "psum_invariant", "pmax", "pmin", traits=Traits(OpKind.OTHER))
def in_place(ctx: OpContext) -> OpRule:
    """Elements meet, or take the place of, those in the same place elsewhere."""
    if ctx.in_shapes != ctx.out_shapes:
        return uncut(ctx)
    factors = FactorList()
    layouts = [[factors.parallel(size) for size in shape] for shape in ctx.in_shapes]
    return OpRule(factors.rule(layouts, layouts))
