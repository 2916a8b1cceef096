"""Opaque ops, and kernels whose grids alone are known, or that bring their own rule.

Every device computes the whole of an opaque op. A Pallas kernel is sharded along the
parallel axes of its grid, a function under `custom_partitioning` as it states.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rhino_jax.frontend.pallas import PALLAS_CALL, Moves, grid_of
from rhino_jax.frontend.registry import OpContext, OpRule, register, register_traits
from rhino_jax.frontend.rules.factors import FactorList
from rhino_jax.ir.factor import Dim, Factor, FactorKind, Rule
from rhino_jax.ir.traits import OpKind, Traits
from rhino_jax.ir.verifier import rule_fault


def unsharded_rule(
    in_shapes: Sequence[Sequence[int]], out_shapes: Sequence[Sequence[int]]
) -> Rule:
    """Return a rule without factors: nothing of the op can be sharded."""
    sides = in_shapes, out_shapes
    return Rule((), *(tuple(((),) * len(s) for s in side) for side in sides))


def unsharded(ctx: OpContext) -> OpRule:
    """Return the rule of last resort, for a case that a rule does not cover."""
    return OpRule(unsharded_rule(ctx.in_shapes, ctx.out_shapes))


EFFECTS = Traits(has_effects=True)

# These have no rule: they stay as their user wrote them, on every device.
register_traits(
    *"""
    addupdate core_call_ref freeze get infeed io_callback new_ref outfeed pure_callback
    python_callback ref_addupdate ref_get ref_set ref_swap run_scoped run_state swap
    """.split(),
    traits=EFFECTS,
)

# XLA replicates calls of foreign functions, whatever rule the user has registered.
register_traits(
    "ffi_call",
    traits=Traits(is_gathered=True),
    local=lambda params, ins, outs: {
        "result_avals": tuple(
            aval.update(shape=shape)
            for aval, shape in zip(params["result_avals"], outs, strict=True)
        )
    },
)


@register(
    *"""
    axis_index dce_sink dim_as_value dimension_size empty2 platform_index
    shape_assertion
    """.split(),
    traits=Traits(OpKind.OTHER),
)
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


CUSTOM_PARTITIONING = "custom_partitioning"


@register(CUSTOM_PARTITIONING, traits=Traits(OpKind.KERNEL))
def custom_partitioning(ctx: OpContext) -> OpRule:
    """Return the rule that a function brings: `def_partition(sharding_rule=…)`.

    It is Shardy's: its factors are parallel, but for those that it lists as reduced, as
    replicated or as permuted. A factor of operands alone that it does not list is
    whole. Rules that are functions of MLIR types, or that do not fit, are not read.
    """
    brought: Any = ctx.params.get("sharding_rule")
    count = len(ctx.in_shapes)
    if not hasattr(brought, "operand_mappings"):
        return unsharded(ctx)
    shapes = (*ctx.in_shapes, *ctx.out_shapes)
    mappings = (*brought.operand_mappings, *brought.result_mappings)
    layouts = [_names(*x) for x in zip(mappings, shapes, strict=False)]
    sizes = dict(brought.factor_sizes)
    for layout, shape in zip(layouts, shapes, strict=False):
        alone = zip(layout, shape, strict=False)
        sizes.update((dim[0], size) for dim, size in alone if len(dim) == 1)
    made = {name for layout in layouts[count:] for dim in layout for name in dim}
    whole = {*brought.need_replication_factors, *brought.permutation_factors}
    factors = []
    for name, size in sizes.items():
        is_reduced = name in brought.reduction_factors
        kind = FactorKind.REDUCE if is_reduced else FactorKind.PARALLEL
        if name in whole or not (is_reduced or name in made):
            kind = FactorKind.WHOLE
        factors.append(Factor(name, size, kind, "sum" if is_reduced else None))
    at = {name: i for i, name in enumerate(sizes)}
    found = [tuple(tuple(at[n] for n in d) for d in layout) for layout in layouts]
    rule = Rule(tuple(factors), tuple(found[:count]), tuple(found[count:]))
    does_fit = rule_fault(rule, ctx.in_shapes, ctx.out_shapes) is None
    return OpRule(rule) if does_fit else unsharded(ctx)


def _names(mapping: Sequence[Any], shape: Sequence[int]) -> list[tuple[str, ...]]:
    """Return the names of each dim's factors; leading dims are written as one entry,
    which begins with an ellipsis."""
    dims = [(dim,) if isinstance(dim, str) else tuple(dim) for dim in mapping]
    if mapping and isinstance(mapping[0], str) and mapping[0].startswith("…"):
        leading = range(len(shape) - len(dims) + 1)
        dims[:1] = [(f"{mapping[0]}.{i}",) for i in leading]
    return dims
