"""Gathers (embedding look-ups, fancy indexing, `take_along_axis`); dynamic slices and
updates, whose positions are known at run time only; scatters and their combining kinds:
transposes of look-ups, segment sums, updates.

Sharding the updates of a combining scatter leaves partial results. The operand must
enter their sum once: one shard starts from the operand, the others from the reducer's
identity (zero for "sum", one for "prod", the extreme for "max", "min").
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rhino_jax.frontend.registry import OpContext, OpRule, Shape, register, result_shape
from rhino_jax.frontend.rules.factors import FactorList
from rhino_jax.ir.factor import Dim
from rhino_jax.ir.traits import OpKind, Traits


def window_dims(
    rank: int, gone: Collection[int], windows: Sequence[int]
) -> dict[int, int]:
    """Return a dim of the array that windows lie in → the dim of the windows along it.

    Args:
      rank: number of dims of the array.
      gone: dims of it that windows do not have.
      windows: dims of the windows, in the order of the array's.
    """
    kept = [d for d in range(rank) if d not in gone]
    return dict(zip(kept, windows, strict=True))


def _local(
    params: Mapping[str, Any], ins: Sequence[Shape], outs: Sequence[Shape]
) -> dict[str, Any]:
    """Set slice sizes so that slices spanning a dim of the operand still span it."""
    dims, sizes = params["dimension_numbers"], list(params["slice_sizes"])
    gone = (*dims.collapsed_slice_dims, *dims.operand_batching_dims)
    for d, offset in window_dims(len(ins[0]), gone, dims.offset_dims).items():
        sizes[d] = outs[0][offset]
    return {"slice_sizes": tuple(sizes)}


@register(
    "gather",
    traits=Traits(OpKind.LOOKUP, masks_padding=True, moves=((0,),)),
    local=_local,
)
def gather(ctx: OpContext) -> OpRule:
    """Return the factors of a gather with any dimension numbers.

    - Batch dims of operand and indices, dims of the indices, and windows over a
      full operand dim: parallel.
    - An operand dim of which an index picks one element: INDEX. Each shard handles
      the indices that fall in it, the others contribute zero, and the results
      are summed ("or" for booleans).
    - Other windows: whole.

    INDEX holds in every mode. With "clip" the index is clamped to the whole dim before
    it is compared with a shard; with "promise_in_bounds" nothing is out of range; with
    "fill" an index outside the whole dim belongs to no shard and is handled once, since
    JAX selects the fill value after the look-up.
    """
    dims = ctx.params["dimension_numbers"]
    slice_sizes = ctx.params["slice_sizes"]
    shapes = *ctx.in_shapes, *ctx.out_shapes
    operand_shape, indices_shape, result_shape = shapes
    factors = FactorList()
    operand, indices, result = (list[Dim]([()] * len(shape)) for shape in shapes)

    batch = [d for d in range(len(result_shape)) if d not in dims.offset_dims]
    for i, d in enumerate(batch):
        indices[i] = result[d] = factors.parallel(indices_shape[i])
    paired = zip(
        dims.operand_batching_dims, dims.start_indices_batching_dims, strict=True
    )
    for operand_dim, indices_dim in paired:
        operand[operand_dim] = indices[indices_dim]

    reducer = "or" if ctx.out_dtypes[0] == "bool" else "sum"
    can_mask = not ctx.out_dtypes[0].startswith("key<")
    gone = (*dims.collapsed_slice_dims, *dims.operand_batching_dims)
    offsets = window_dims(len(operand_shape), gone, dims.offset_dims)
    for d, size in enumerate(operand_shape):
        if d in dims.operand_batching_dims:
            continue
        offset = offsets.get(d)
        if offset is not None and slice_sizes[d] == size:
            operand[d] = result[offset] = factors.parallel(size)
        elif can_mask and slice_sizes[d] == 1 and d in dims.start_index_map:
            operand[d] = factors.index(size, reducer)
        else:
            operand[d] = factors.whole(size)
    return OpRule(factors.rule([operand, indices], [result]))


@register(
    "dynamic_slice",
    traits=Traits(OpKind.MOVEMENT, moves=((0,),)),
    local=result_shape("slice_sizes"),
)
def dynamic_slice(ctx: OpContext) -> OpRule:
    """Return the rule: dims taken in full are parallel; along sliced dims the operand
    is whole, and each device may take its own part of the slice."""
    operand_shape, *starts = ctx.in_shapes
    (result_shape,) = ctx.out_shapes
    factors = FactorList()
    operand: list[Dim] = []
    result: list[Dim] = []
    for size, length in zip(operand_shape, result_shape, strict=True):
        is_full = size == length
        operand.append(factors.parallel(size) if is_full else factors.whole(size))
        result.append(operand[-1] if is_full else factors.parallel(length))
    rule = factors.rule([operand, *([()] * len(starts))], [result])
    return OpRule(rule, is_fusible=True)


@register(
    "dynamic_update_slice",
    traits=Traits(OpKind.UPDATE, fuses_operands=True, updates=1, moves=((0, 1),)),
)
def dynamic_update_slice(ctx: OpContext) -> OpRule:
    """Return the rule: dims updated in full are parallel, those of one-element updates
    INDEX.

    An update of one element falls into one shard, and the others leave theirs unchanged
    (a KV cache that is sharded along the sequence is written this way, without
    communication). Longer updates may straddle shards, and are whole.
    """
    operand_shape, update_shape, *starts = ctx.in_shapes
    factors = FactorList()
    operand: list[Dim] = []
    update: list[Dim] = []
    for size, length in zip(operand_shape, update_shape, strict=True):
        if size == length:
            operand.append(factors.parallel(size))
        elif length == 1:
            operand.append(factors.index(size))
        else:
            operand.append(factors.whole(size))
        update.append(operand[-1] if size == length else ())
    rule = factors.rule([operand, update, *([()] * len(starts))], [operand])
    return OpRule(rule)


REDUCERS = {
    "scatter-add": "sum",
    "scatter_add": "sum",
    "scatter-mul": "prod",
    "scatter_mul": "prod",
    "scatter-min": "min",
    "scatter_min": "min",
    "scatter-max": "max",
    "scatter_max": "max",
}
"""Primitive → how partial results of scatters with sharded updates combine."""

_SUBTRACTING = ("scatter-sub", "scatter_sub")


def _traits(name: str) -> Traits:
    reducer = REDUCERS.get(name, "")
    return Traits(
        OpKind.SCATTER,
        fuses_operands=True,
        updates=2,
        moves=((0, 2),) if name == "scatter" else (),
        linear=((0, 2),) if reducer == "sum" or name in _SUBTRACTING else (),
        reducer=reducer,
        accumulates=(0,) if reducer else (),
    )


@register("scatter", *_SUBTRACTING, *REDUCERS, traits=_traits)
def scatter(ctx: OpContext) -> OpRule:
    """Return the factors of a scatter with any dimension numbers.

    - Batch dims of operand, indices and updates, and windows over a full operand
      dim: parallel.
    - An operand dim in which an index picks one element: INDEX. Each shard applies
      the updates that fall in it and drops the others; the result is complete.
    - Dims along which several updates lie: REDUCE where updates combine; whole
      where they overwrite, as the last one wins, and where they are subtracted,
      which XLA's partitioner does not treat as a sum (it gathers them).
    - Other windows: whole.
    """
    dims = ctx.params["dimension_numbers"]
    operand_shape, indices_shape, updates_shape = ctx.in_shapes
    reducer = REDUCERS.get(ctx.primitive)
    factors = FactorList()
    operand, indices, updates = (list[Dim]([()] * len(s)) for s in ctx.in_shapes)

    batch = [d for d in range(len(updates_shape)) if d not in dims.update_window_dims]
    for i, d in enumerate(batch):
        size = indices_shape[i]
        if i in dims.scatter_indices_batching_dims:
            factor = factors.parallel(size)
        elif reducer is not None:
            factor = factors.reduce(size, reducer)
        else:
            factor = factors.whole(size)
        indices[i] = updates[d] = factor
    paired = zip(
        dims.operand_batching_dims, dims.scatter_indices_batching_dims, strict=True
    )
    for operand_dim, indices_dim in paired:
        operand[operand_dim] = indices[indices_dim]

    gone = (*dims.inserted_window_dims, *dims.operand_batching_dims)
    windows = window_dims(len(operand_shape), gone, dims.update_window_dims)
    for d, size in enumerate(operand_shape):
        if d in dims.operand_batching_dims:
            continue
        window = windows.get(d)
        window_size = 1 if window is None else updates_shape[window]
        if window is not None and window_size == size:
            operand[d] = updates[window] = factors.parallel(size)
        elif window_size == 1 and d in dims.scatter_dims_to_operand_dims:
            operand[d] = factors.index(size)
        else:
            operand[d] = factors.whole(size)
    flops = float(math.prod(updates_shape)) if reducer else 0.0
    rule = factors.rule([operand, indices, updates], [operand])
    # `x.at[i].apply(fn)` is a scatter, too: of what `fn` makes of the elements.
    applies = ctx.primitive == "scatter" and ctx.params.get("update_jaxpr") is not None
    traits = replace(_traits(ctx.primitive), moves=()) if applies else None
    return OpRule(rule, flops, traits=traits)
