"""Pallas kernels, sharded along the parallel axes of their grids."""

from __future__ import annotations

from rhino_jax.frontend.pallas import PALLAS_CALL, Moves, grid_of
from rhino_jax.frontend.registry import OpContext, OpRule, register
from rhino_jax.frontend.rules.factors import FactorList
from rhino_jax.frontend.rules.opaque import uncut
from rhino_jax.ir.factor import Dim
from rhino_jax.ir.traits import OpKind, Traits


@register(PALLAS_CALL, traits=Traits(OpKind.KERNEL))
def pallas_call(ctx: OpContext) -> OpRule:
    """Return the rule: one factor for every parallel axis of the grid; blocks
    themselves are whole."""
    grid = grid_of(ctx.params)
    if grid is None or not grid.parallel:
        return uncut(ctx)
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
