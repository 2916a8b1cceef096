"""Gathers (embedding look-ups, fancy indexing, `take_along_axis`); dynamic slices and
updates, whose positions are known at run time only; scatters and their combining kinds:
transposes of look-ups, segment sums, updates.

Sharding the updates of a combining scatter leaves partial results. The operand must
enter their sum once: one shard starts from the operand, the others from the reducer's
identity (zero for "sum", one for "prod", the extreme for "max", "min").
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from rhino_jax.frontend.registry import (
    OpContext,
    OpRule,
    by_name,
    register,
    result_shape,
)
from rhino_jax.frontend.rules.factors import FactorList, dimwise
from rhino_jax.ir.factor import Dim, Rule
from rhino_jax.ir.traits import OpKind, Traits


class IndexedDims(NamedTuple):
    """The dimension numbers of a gather or a scatter, by names that serve both.

    Attributes:
      indexed: dims of the operand that indices address.
      dropped: dims of the operand that windows do not have.
      batch: batching dims of the operand.
      paired: batching dims of the indices, in the same order.
      windows: dims of the gathered or updated windows, in the order of the operand's.
    """

    indexed: tuple[int, ...]
    dropped: tuple[int, ...]
    batch: tuple[int, ...]
    paired: tuple[int, ...]
    windows: tuple[int, ...]

    @classmethod
    def of(cls, numbers: Any) -> IndexedDims:
        """Return JAX's dimension numbers under these names."""
        return cls(*(getattr(numbers, name) for name in _fields(numbers)))

    def put(self, numbers: Any) -> Any:
        """Return JAX's dimension numbers with these dims in place of their own."""
        return numbers._replace(**dict(zip(_fields(numbers), self, strict=True)))

    def windows_of(self, rank: int) -> list[int | None]:
        """Return the dim of the windows along each of the operand's `rank` dims."""
        gone, windows = {*self.dropped, *self.batch}, iter(self.windows)
        return [None if d in gone else next(windows) for d in range(rank)]


def _fields(numbers: Any) -> Sequence[str]:
    """Return JAX's names of the fields of `IndexedDims`."""
    if hasattr(numbers, "offset_dims"):
        return """start_index_map collapsed_slice_dims operand_batching_dims
            start_indices_batching_dims offset_dims""".split()
    return """scatter_dims_to_operand_dims inserted_window_dims operand_batching_dims
        scatter_indices_batching_dims update_window_dims""".split()


def _indexed(
    ctx: OpContext,
    repeated: Callable[[FactorList, int], Dim],
    picked: Callable[[FactorList, int], Dim],
) -> Rule:
    """Return the rule of a gather or scatter of any dimension numbers.

    Args:
      ctx: the op; its third array, a result or operand, holds the windows.
      repeated: adds the factor of a dim along which several windows lie.
      picked: adds the factor of an operand dim of which an index picks one element.
    """
    dims, factors = IndexedDims.of(ctx.params["dimension_numbers"]), FactorList()
    shapes = *ctx.in_shapes, *ctx.out_shapes
    layouts = [list[Dim]([()] * len(shape)) for shape in shapes[:3]]
    operand, indices, windowed = layouts
    batch = [d for d in range(len(windowed)) if d not in dims.windows]
    for i, d in enumerate(batch):
        add = FactorList.parallel if i in dims.paired else repeated
        indices[i] = windowed[d] = add(factors, shapes[1][i])
    for d, i in zip(dims.batch, dims.paired, strict=True):
        operand[d] = indices[i]
    windows = dims.windows_of(len(operand))
    for d, (size, window) in enumerate(zip(shapes[0], windows, strict=True)):
        if d in dims.batch:
            continue
        length = 1 if window is None else shapes[2][window]
        if window is not None and length == size:
            operand[d] = windowed[window] = factors.parallel(size)
        else:
            is_picked = length == 1 and d in dims.indexed
            operand[d] = (picked if is_picked else FactorList.whole)(factors, size)
    count = len(ctx.in_shapes)
    return factors.rule(layouts[:count], layouts[count:] or [operand])


@register(
    "gather",
    traits=Traits(OpKind.LOOKUP, masks_padding=True, moves=((0,),)),
    # Slices that span a dim of the operand span what a part has of it.
    local=lambda params, ins, outs: {
        "slice_sizes": tuple(
            size if window is None else outs[0][window]
            for size, window in zip(
                params["slice_sizes"],
                IndexedDims.of(params["dimension_numbers"]).windows_of(len(ins[0])),
                strict=True,
            )
        )
    },
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
    (dtype,) = ctx.out_dtypes
    reducer = "or" if dtype == "bool" else "sum"
    picked = (
        FactorList.whole
        if dtype.startswith("key<")
        else partial(FactorList.index, reducer=reducer)
    )
    return OpRule(_indexed(ctx, FactorList.parallel, picked))


@register(
    "dynamic_slice",
    traits=Traits(OpKind.MOVEMENT, moves=((0,),)),
    local=result_shape("slice_sizes"),
)
def dynamic_slice(ctx: OpContext) -> OpRule:
    """Return the rule: dims taken in full are parallel; along sliced dims the operand
    is whole, and each device may take its own part of the slice."""
    rule = dimwise(
        ctx,
        lambda factors, d, size, length: (
            factors.same(size)
            if size == length
            else (factors.whole(size), factors.parallel(length))
        ),
    )
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
    factors, (_, _, *starts) = FactorList(), ctx.in_shapes
    operand, update = factors.pairs(
        ctx.in_shapes[0],
        ctx.in_shapes[1],
        lambda d, size, length: (
            factors.same(size)
            if size == length
            else ((factors.index if length == 1 else factors.whole)(size), ())
        ),
    )
    return OpRule(factors.rule([operand, update, *([] for _ in starts)], [operand]))


REDUCERS = by_name(
    {
        "sum": "scatter-add scatter_add",
        "prod": "scatter-mul scatter_mul",
        "min": "scatter-min scatter_min",
        "max": "scatter-max scatter_max",
    }
)
"""Primitive → how partial results of scatters with sharded updates combine."""

SUBTRACTING = ("scatter-sub", "scatter_sub")


def _traits(name: str) -> Traits:
    reducer = REDUCERS.get(name, "")
    return Traits(
        OpKind.SCATTER,
        fuses_operands=True,
        updates=2,
        moves=((0, 2),) if name == "scatter" else (),
        linear=((0, 2),) if reducer == "sum" or name in SUBTRACTING else (),
        reducer=reducer,
        accumulates=(0,) if reducer else (),
    )


@register("scatter", *SUBTRACTING, *REDUCERS, traits=_traits)
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
    reducer = REDUCERS.get(ctx.primitive)
    repeated = (
        partial(FactorList.reduce, reducer=reducer) if reducer else FactorList.whole
    )
    rule = _indexed(ctx, repeated, FactorList.index)
    flops = float(math.prod(ctx.in_shapes[2])) if reducer else 0.0
    # `x.at[i].apply(fn)` is a scatter, too: of what `fn` makes of the elements.
    applies = ctx.primitive == "scatter" and ctx.params.get("update_jaxpr") is not None
    traits = replace(_traits(ctx.primitive), moves=()) if applies else None
    return OpRule(rule, flops, traits=traits)
