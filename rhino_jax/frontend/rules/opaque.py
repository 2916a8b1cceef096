"""Opaque ops, and kernels whose grids alone are known.

Every device computes the whole of an opaque op. A Pallas kernel is sharded along the
parallel axes of its grid.
"""

from __future__ import annotations

from collections.abc import Sequence

from rhino_jax.frontend.pallas import PALLAS_CALL, Moves, grid_of
from rhino_jax.frontend.registry import OpContext, OpRule, register, register_traits
from rhino_jax.frontend.rules.factors import FactorList
from rhino_jax.ir.factor import Dim, Layout, Rule
from rhino_jax.ir.traits import OpKind, Traits


def unsharded_rule(
    in_shapes: Sequence[Sequence[int]], out_shapes: Sequence[Sequence[int]]
) -> Rule:
    """Return a rule without factors: nothing of the op can be sharded."""
    return Rule((), _unsharded(in_shapes), _unsharded(out_shapes))


def unsharded(ctx: OpContext) -> OpRule:
    """Return the rule of last resort, for a case that a rule does not cover."""
    return OpRule(unsharded_rule(ctx.in_shapes, ctx.out_shapes))


def _unsharded(shapes: Sequence[Sequence[int]]) -> tuple[Layout, ...]:
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
    return unsharded(ctx)


@register(
    PALLAS_CALL,
    traits=Traits(OpKind.KERNEL),
    label=lambda params: str(params.get("name") or ""),
)
def pallas_call(ctx: OpContext) -> OpRule:
    """Return the rule: one factor for every parallel axis of the grid; blocks
    themselves are whole."""
    grid = grid_of(ctx.params)
    if grid is None or not grid.parallel:
        return unsharded(ctx)
    factors = FactorList()
    axes = {axis: factors.parallel(grid.sizes[axis]) for axis in sorted(grid.parallel)}

    def layout(moves: Moves, shape: tuple[int, ...]) -> list[Dim]:
        return [
            factors.whole(size)
            if axis is None
            else axes[axis] + factors.whole(size // grid.sizes[axis])
            for axis, size in zip(moves, shape, strict=True)
        ]

    ins = [layout(*x) for x in zip(grid.operands, ctx.in_shapes, strict=True)]
    outs = [layout(*x) for x in zip(grid.results, ctx.out_shapes, strict=True)]
    return OpRule(factors.rule(ins, outs))
