"""One op on one shard: its parameters that carry sizes, windows and indices, localised.

Most primitives run on a shard with unchanged parameters. Those that carry the sizes of
their result, pad their operand, or follow indices are rewritten here, as XLA's SPMD
partitioner rewrites them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rhino_jax.frontend.check.indexed import INDEXED
from rhino_jax.frontend.check.shards import (
    Finish,
    LocalOp,
    Results,
    Shard,
    ShardMismatch,
    shard_operand,
)
from rhino_jax.frontend.pallas import grid_of, local_params as local_kernel
from rhino_jax.frontend.registry import local_params, traits_of
from rhino_jax.ir.factor import FactorKind
from rhino_jax.ir.traits import OpKind


def localise(op: LocalOp) -> tuple[LocalOp, Finish]:
    """Return the op to run on one shard, and a function that finishes its results.

    Returns:
      The op with the operands and parameters to run its primitive with, and a function
      that turns the outcome into results of shapes `op.out_shapes`.
    """
    if _is_generator(op.name):
        return op, functools.partial(_keep_drawn, op)
    if op.name in INDEXED:
        return INDEXED[op.name](op)
    if traits_of(op.name).kind is OpKind.CONVOLUTION:
        op = _conv(op)
    elif "window_dimensions" in op.params:
        op = _windows(op)
    ins = [tuple(x.shape) for x in op.operands]
    op = replace(op, params=local_params(op.name, op.params, ins, op.out_shapes))
    if "grid_mapping" in op.params:
        op = _on_part_of_grid(op)
    return op, lambda results: results


def _on_part_of_grid(op: LocalOp) -> LocalOp:
    """Localise a Pallas kernel, whatever its name: its grid covers the shard only."""
    grid = grid_of(op.params)
    if grid is None:
        return op
    pieces = [1] * len(grid.sizes)
    whole = (*op.in_shapes, *(aval.shape for aval in op.params["out_avals"]))
    local = (*(x.shape for x in op.operands), *op.out_shapes)
    for moves, *shapes in zip(
        (*grid.operands, *grid.results), whole, local, strict=True
    ):
        for axis, size, part in zip(moves, *shapes, strict=True):
            if axis is not None:
                pieces[axis] = size // part
    return replace(op, params=local_kernel(op.params, grid, pieces))


def _is_generator(name: str) -> bool:
    """Whether elements depend on their position in the whole, except for dims of keys.

    A shard is by definition that part of the whole: partitioners compute it from global
    positions. Only the shapes in the rule can be wrong.
    """
    return traits_of(name).kind is OpKind.GENERATOR


def shard_operands(
    name: str, operands: Sequence[np.ndarray], shard: Shard
) -> tuple[np.ndarray, ...]:
    """Return a shard's blocks of all operands, with halos.

    Operands of generators are only sharded along the dims of their keys.
    """
    if _is_generator(name):
        shard = shard.only(_key_factors(shard))
    layouts = zip(operands, shard.rule.operands, strict=True)
    # A kernel's taps are sharded without halo, only the image needs borders.
    is_conv = traits_of(name).kind is OpKind.CONVOLUTION
    return tuple(
        shard_operand(x, layout, shard, i == 0 or not is_conv)
        for i, (x, layout) in enumerate(layouts)
    )


def _key_factors(shard: Shard) -> set[int]:
    return {f for layout in shard.rule.operands[:1] for dim in layout for f in dim}


def _keep_drawn(op: LocalOp, results: Results) -> Results:
    """Slice the shard's part out of everything that its keys draw."""
    rule, keys = op.shard.rule, _key_factors(op.shard)
    drawn = op.shard.only(set(range(len(rule.factors))) - keys)
    return [
        shard_operand(
            result, [() if set(d) & keys else d for d in layout], drawn, False
        )
        for layout, result in zip(rule.results, results, strict=True)
    ]


def _window_padding(
    op: LocalOp,
    operand: int,
    dim: int,
    padding: tuple[int, int],
    stride: int,
    extent: int,
    base_dilation: int,
) -> tuple[int, int]:
    """Return the padding of a shard's block with which its windows keep their
    positions.

    Elements that a block lacks at either end count as padding: correct at the border of
    the whole, and a visible mistake where the rule's halo is too small.
    """
    (factor,) = op.sharded_factors(operand, dim)
    size = op.in_shapes[operand][dim]
    begin, end = op.shard.halo_range(factor, size)
    first = op.shard.start(factor) * stride - padding[0]
    last = first + (op.shard.size(factor) - 1) * stride + extent
    low = begin * base_dilation - first
    high = last - ((end - 1) * base_dilation + 1)
    return low, high


def _windows(op: LocalOp) -> LocalOp:
    """Localise pooling: elements that a shard has but does not need are cropped."""
    params, rank = op.params, len(op.out_shapes[0])
    padding = [tuple(p) for p in params["padding"]]
    operands = list(op.operands)
    for d in range(rank):
        cut = op.sharded_factors(0, d)
        if not cut or op.shard.rule.factors[cut[0]].kind is not FactorKind.HALO:
            continue
        window = params["window_dimensions"][d]
        extent = (window - 1) * params.get("window_dilation", (1,) * rank)[d] + 1
        low, high = _window_padding(
            op, 0, d, padding[d], params["window_strides"][d], extent, 1
        )
        padding[d] = (max(low, 0), max(high, 0))
        crop = slice(max(-low, 0), None if high >= 0 else high)
        index = (slice(None),) * d + (crop,)
        operands = [x[index] if x.ndim == rank else x for x in operands]
    return op.with_params(padding=tuple(padding)).with_operands(*operands)


def _conv(op: LocalOp) -> LocalOp:
    """Localise a convolution: windows slide by strides where outputs are sharded, by
    dilations where taps are."""
    params, rule = op.params, op.shard.rule
    dims = params["dimension_numbers"]
    padding = [tuple(p) for p in params["padding"]]
    for i, d in enumerate(dims.lhs_spec[2:]):
        cut = op.sharded_factors(0, d)
        if not cut or rule.factors[cut[0]].kind is not FactorKind.HALO:
            continue
        steps = [params["window_strides"][i], params["rhs_dilation"][i]]
        others = op.in_shapes[1][dims.rhs_spec[2 + i]]
        if cut[0] in rule.operands[1][dims.rhs_spec[2 + i]]:
            steps.reverse()
            others = op.out_shapes[0][dims.out_spec[2 + i]]
        extent = (others - 1) * steps[1] + 1
        padding[i] = _window_padding(
            op, 0, d, padding[i], steps[0], extent, params["lhs_dilation"][i]
        )
    groups = set(rule.operands[1][dims.rhs_spec[0]])
    changed: dict[str, Any] = {"padding": tuple(padding)}
    for key, lhs_dim in (
        ("batch_group_count", dims.lhs_spec[0]),
        ("feature_group_count", dims.lhs_spec[1]),
    ):
        for f in groups & set(rule.operands[0][lhs_dim]):
            shards = rule.factors[f].size // op.shard.size(f)
            if params[key] % shards:
                raise ShardMismatch(f"{params[key]} groups do not divide by {shards}")
            changed[key] = params[key] // shards
    return op.with_params(**changed)
