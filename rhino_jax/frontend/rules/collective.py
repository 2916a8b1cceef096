"""Collectives over a named axis, in the body of manually partitioned code
(`shard_map`).

Sharding here is along other axes of the mesh. The bytes that these collectives send do
not follow from factors: see `rhino_jax.frontend.manual`.
"""

from __future__ import annotations

from dataclasses import replace

from rhino_jax.frontend.registry import OpContext, OpRule, register
from rhino_jax.frontend.rules.elementwise import passing
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
    return replace(passing(ctx), is_fusible=False)
