"""Opaque ops: every device computes the whole."""

from __future__ import annotations

from collections.abc import Sequence

from rhino_jax.frontend.registry import OpContext, OpRule, register
from rhino_jax.ir.factor import Layout, Rule
from rhino_jax.ir.traits import OpKind, Traits


def uncut_rule(
    in_shapes: Sequence[Sequence[int]], out_shapes: Sequence[Sequence[int]]
) -> Rule:
    """Return a rule without factors: nothing of the op can be sharded."""
    return Rule((), _uncut(in_shapes), _uncut(out_shapes))


def uncut(ctx: OpContext) -> OpRule:
    """Return the rule of last resort, for a case that a rule does not cover."""
    return OpRule(uncut_rule(ctx.in_shapes, ctx.out_shapes))


def _uncut(shapes: Sequence[Sequence[int]]) -> tuple[Layout, ...]:
    return tuple(((),) * len(shape) for shape in shapes)


@register(
    "after_all", "create_token", "dce_sink", "debug_callback", "debug_print",
    "dim_as_value", "dimension_size", "empty2", "platform_index", "shape_assertion",
    traits=Traits(OpKind.OTHER),
)  # fmt: skip
def bookkeeping(ctx: OpContext) -> OpRule:
    """Return the rule of ops that compute nothing worth sharding."""
    return uncut(ctx)
