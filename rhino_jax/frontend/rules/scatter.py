"""Scatter and its combining kinds: transposes of look-ups, segment sums, updates.

Sharding the updates of a combining scatter leaves partial results. The operand must
enter their sum once: one shard starts from the operand, the others from the reducer's
identity (zero for "sum", one for "prod", the extreme for "max", "min").
"""

from __future__ import annotations

import math
from dataclasses import replace

from rhino_jax.frontend.registry import OpContext, OpRule, register
from rhino_jax.frontend.rules.factors import FactorList
from rhino_jax.frontend.rules.gather import window_dims
from rhino_jax.ir.factor import Dim
from rhino_jax.ir.traits import OpKind, Traits


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
    operand: list[Dim] = [()] * len(operand_shape)
    indices: list[Dim] = [()] * len(indices_shape)
    updates: list[Dim] = [()] * len(updates_shape)

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
