"""One op on one shard: the arrays and parameters to run its primitive with.

Along most factors a shard is a part of the op's dims, on which the primitive runs with
parameters of that part. Where a built-in op slides windows, moves elements or follows
indices, positions in the whole dim count: there it runs on the whole dim, in which
other values replace the elements that the shard lacks, and the shard's part of the
result is taken. A rule whose shards need more than they hold gives wrong results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rhino_jax.frontend.check.run import Call
from rhino_jax.frontend.check.shards import Shard, ShardMismatch, shard_operand
from rhino_jax.frontend.pallas import grid_of, local_params as local_kernel
from rhino_jax.frontend.registry import is_built_in, local_params, traits_of
from rhino_jax.frontend.rules.reduce import identity
from rhino_jax.ir.factor import Dim, FactorKind
from rhino_jax.ir.traits import OpKind


Results = list[np.ndarray]

Finish = Callable[[Results], Results]
"""A function from the primitive's results on a shard to the shard's results."""

_PLACED = (FactorKind.HALO, FactorKind.INDEX)


def localise(
    eqn: Any, operands: Sequence[np.ndarray], shard: Shard
) -> tuple[Call, Finish]:
    """Return the run of an equation's primitive on one shard, and a function that takes
    the shard's results from those of the run.

    Args:
      eqn: the equation.
      operands: its operands; PRNG keys as words, in trailing dims.
      shard: the shard.

    Raises:
      ShardMismatch: the op cannot run on this part.
    """
    rule, name = shard.rule, eqn.primitive.name
    in_place = _in_place(name, shard)
    cut = shard.only(set(range(len(rule.factors))) - in_place)
    sizes = tuple(replace(f, size=cut.size(i)) for i, f in enumerate(rule.factors))
    rest = replace(shard.only(in_place), rule=replace(rule, factors=sizes))
    # A kernel's taps are sharded without halo, only the image needs borders.
    kind = traits_of(name).kind
    is_conv = kind is OpKind.CONVOLUTION
    blocks = []
    for i, (x, layout) in enumerate(zip(operands, rule.operands, strict=True)):
        has_halo = i == 0 or not is_conv
        block = shard_operand(x, layout, cut, has_halo)
        blocks.append(_masked(block, layout, rest, has_halo))
    for axis, place in zip(shard.strategy, shard.coordinates, strict=True):
        factor = rule.factors[axis.factor]
        if kind is OpKind.SCATTER and factor.kind is FactorKind.REDUCE and place:
            # The operand enters the sum of partial results once.
            empty = identity(factor.reducer or "sum", blocks[0].dtype)
            blocks[0] = np.full_like(blocks[0], empty)
    layouts = zip(rule.results, eqn.outvars, strict=True)
    outs = [cut.local_shape(layout, v.aval.shape) for layout, v in layouts]
    ins = [x.shape[: len(dims)] for x, dims in zip(blocks, rule.operands, strict=True)]
    params = local_params(name, eqn.params, ins, outs)
    if is_conv:
        params |= _groups(eqn, shard)
    if "grid_mapping" in params:
        params = _on_part_of_grid(eqn, (*ins, *outs))
    if "fill_value" in params and any(map(rest.start, in_place)):
        params["fill_value"] = 0  # the first shard looks up indices that are outside

    def finish(results: Results) -> Results:
        pairs = zip(results, rule.results, strict=True)
        return [shard_operand(x, layout, rest, False) for x, layout in pairs]

    return (blocks, params), finish


def _in_place(name: str, shard: Shard) -> set[int]:
    """Return the sharded factors whose elements keep their positions in the whole dim:
    of windows, shifts and indices; and, where an op moves elements or generates them by
    their positions, those of its result alone."""
    rule, kind = shard.rule, traits_of(name).kind
    if kind is OpKind.KERNEL or not is_built_in(name):
        return set()
    layouts = rule.operands[: 1 if kind is OpKind.GENERATOR else None]
    read = {f for layout in layouts for dim in layout for f in dim}
    is_placing = kind in (OpKind.GENERATOR, OpKind.MOVEMENT)
    return {
        f
        for f, factor in enumerate(rule.factors)
        if factor.kind in _PLACED or (is_placing and f not in read)
    }


def _masked(x: np.ndarray, layout: Sequence[Dim], shard: Shard, has_halo: bool) -> Any:
    """Return an operand with other values in place of the elements that a shard lacks:
    the identity where results are combined, else values that would be seen in them."""
    for d, dim in enumerate(layout):
        for f in dim:
            factor = shard.rule.factors[f]
            if not shard.is_sharded(f) or factor.kind not in _PLACED or not x.size:
                continue
            begin, end = shard.start(f), shard.start(f) + shard.size(f)
            if factor.kind is FactorKind.HALO and has_halo:
                begin, end = shard.halo_range(f, x.shape[d])
            at = np.arange(x.shape[d]).reshape(-1, *[1] * (x.ndim - d - 1))
            other = ~x if x.dtype == np.bool_ else x.max() + 1
            if factor.reducer is not None:
                other = identity(factor.reducer, x.dtype)
            x = np.where((begin <= at) & (at < end), x, other)
    return x


def _groups(eqn: Any, shard: Shard) -> dict[str, int]:
    """Return the numbers of groups of a convolution on one shard."""
    dims, rule = eqn.params["dimension_numbers"], shard.rule
    changed = {}
    for key, lhs_dim in (
        ("batch_group_count", dims.lhs_spec[0]),
        ("feature_group_count", dims.lhs_spec[1]),
    ):
        for f in {*rule.operands[1][dims.rhs_spec[0]]} & {*rule.operands[0][lhs_dim]}:
            shards = rule.factors[f].size // shard.size(f)
            if eqn.params[key] % shards:
                raise ShardMismatch(
                    f"{eqn.params[key]} groups do not divide by {shards}"
                )
            changed[key] = eqn.params[key] // shards
    return changed


def _on_part_of_grid(eqn: Any, local: Sequence[tuple[int, ...]]) -> dict[str, Any]:
    """Return the parameters of a Pallas kernel, whatever its name, on the grid of a
    shard.

    Args:
      eqn: the equation.
      local: shapes of the shard's operands and results.
    """
    grid = grid_of(eqn.params)
    if grid is None:
        return {**eqn.params}
    pieces = [1] * len(grid.sizes)
    whole = [v.aval.shape for v in (*eqn.invars, *eqn.outvars)]
    moves = (*grid.operands, *grid.results)
    for axes, *shapes in zip(moves, whole, local, strict=True):
        for axis, size, part in zip(axes, *shapes, strict=True):
            if axis is not None:
                pieces[axis] = size // part
    return local_kernel(eqn.params, grid, pieces)
