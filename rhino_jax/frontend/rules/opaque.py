"""Opaque ops: every device computes the whole."""

from __future__ import annotations

from collections.abc import Sequence

from rhino_jax.frontend.registry import OpContext, OpRule, register, register_traits
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


EFFECTS = Traits(has_effects=True)

# These have no rule: they stay as their user wrote them, on every device.
register_traits(
    "addupdate", "core_call_ref", "freeze", "get", "infeed", "io_callback", "new_ref",
    "outfeed", "pure_callback", "python_callback", "ref_addupdate", "ref_get",
    "ref_set", "ref_swap", "run_scoped", "run_state", "swap",
    traits=EFFECTS,
)  # fmt: skip


@register(
    "dce_sink", "dim_as_value", "dimension_size", "empty2", "platform_index",
    "shape_assertion",
    traits=Traits(OpKind.OTHER),
)  # fmt: skip
@register("after_all", "create_token", "debug_callback", "debug_print", traits=EFFECTS)
def bookkeeping(ctx: OpContext) -> OpRule:
    """Return the rule of ops that compute nothing worth sharding."""
    return uncut(ctx)
