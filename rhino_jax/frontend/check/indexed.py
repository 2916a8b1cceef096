"""Ops that move elements, on one shard: gathers and scatters on the part of the operand
that the indices address; the part of slices, pads and concatenations that lies there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import accumulate

import numpy as np
from jax.lax import GatherScatterMode

from rhino_jax.frontend.check.shards import Finish, LocalOp, Results
from rhino_jax.frontend.rules.dot import RAGGED_DOTS
from rhino_jax.frontend.rules.gather import REDUCERS, window_dims
from rhino_jax.frontend.rules.reduce import identity
from rhino_jax.ir.factor import FactorKind


def _index_factor(op: LocalOp, dim: int) -> int | None:
    """Return the sharded INDEX factor of a dim of the first operand, or None."""
    for factor in op.sharded_factors(0, dim):
        if op.shard.rule.factors[factor].kind is FactorKind.INDEX:
            return factor
    return None


def _gather(op: LocalOp) -> tuple[LocalOp, Finish]:
    """Look up the indices that fall into the shard; contribute the identity for all
    others.

    An index outside the whole dim is handled by the first shard.
    """
    dims, params = op.params["dimension_numbers"], op.params
    operand, indices = op.operands
    sizes = tuple(
        local if length == size else length
        for length, size, local in zip(
            params["slice_sizes"], op.in_shapes[0], operand.shape, strict=False
        )
    )
    indices = indices.astype(np.int32)
    owned = np.ones(indices.shape[:-1], bool)
    reducer = None
    for column, d in enumerate(dims.start_index_map):
        factor = _index_factor(op, d)
        if factor is None:
            continue
        reducer = op.shard.rule.factors[factor].reducer
        size = op.in_shapes[0][d]
        index = indices[..., column]
        if params["mode"] != GatherScatterMode.FILL_OR_DROP:
            index = np.clip(index, 0, size - 1)
        start = op.shard.start(factor)
        is_inside = (index >= 0) & (index < size)
        is_mine = (index >= start) & (index < start + op.shard.size(factor))
        owned &= is_mine | (~is_inside & (start == 0))
        indices[..., column] = np.where(
            is_mine, index - start, np.where(is_inside, 0, -1)
        )
    local = op.with_params(
        slice_sizes=sizes, indices_are_sorted=False, unique_indices=False
    ).with_operands(operand, indices)
    mask = np.expand_dims(owned, tuple(dims.offset_dims))

    def keep_owned(results: Results) -> Results:
        (result,) = results
        return [np.where(mask, result, identity(reducer or "sum", result.dtype))]

    return local, keep_owned if not owned.all() else _as_is


def _scatter(op: LocalOp) -> tuple[LocalOp, Finish]:
    """Apply the updates that fall into the shard, and drop the others."""
    dims, params = op.params["dimension_numbers"], op.params
    operand, indices, updates = op.operands
    reducer = _reducer_of_others(op)
    if reducer is not None:
        operand = np.full_like(operand, identity(reducer, operand.dtype))
    operand_dims = dims.scatter_dims_to_operand_dims
    if all(_index_factor(op, d) is None for d in operand_dims):
        return op.with_operands(operand, indices, updates), _as_is
    indices = indices.astype(np.int32)
    for column, d in enumerate(operand_dims):
        index, size = indices[..., column], op.in_shapes[0][d]
        if params["mode"] == GatherScatterMode.CLIP:
            index = np.clip(index, 0, size - _update_window(op, d))
        factor = _index_factor(op, d)
        if factor is not None:
            start = op.shard.start(factor)
            is_mine = (index >= start) & (index < start + op.shard.size(factor))
            index = np.where(is_mine, index - start, -1)
        indices[..., column] = index
    local = op.with_params(
        mode=GatherScatterMode.FILL_OR_DROP,
        indices_are_sorted=False,
        unique_indices=False,
    )
    return local.with_operands(operand, indices, updates), _as_is


def _reducer_of_others(op: LocalOp) -> str | None:
    """Return how this shard's partial result is combined; None if it starts from the
    operand."""
    for cut, coordinate in zip(op.shard.strategy, op.shard.coordinates, strict=True):
        factor = op.shard.rule.factors[cut.factor]
        if factor.kind is FactorKind.REDUCE and coordinate > 0:
            return factor.reducer
    return None


def _update_window(op: LocalOp, dim: int) -> int:
    """Return how many elements of an operand's dim one update covers."""
    dims = op.params["dimension_numbers"]
    gone = (*dims.inserted_window_dims, *dims.operand_batching_dims)
    windows = window_dims(len(op.in_shapes[0]), gone, dims.update_window_dims)
    return op.in_shapes[2][windows[dim]] if dim in windows else 1


def _dynamic_slice(op: LocalOp) -> tuple[LocalOp, Finish]:
    """Make every shard slice from the offset of its own part of the result."""
    operand, *starts = op.operands
    layout, rule = op.shard.rule.results[0], op.shard.rule
    for d, (dim, size) in enumerate(zip(layout, op.in_shapes[0], strict=True)):
        for f in set(dim) - set(rule.operands[0][d]):
            start = np.clip(starts[d], 0, size - rule.factors[f].size)
            starts[d] = np.asarray(start + op.shard.start(f), starts[d].dtype)
    local = op.with_params(slice_sizes=op.out_shapes[0])
    return local.with_operands(operand, *starts), _as_is


def _dynamic_update_slice(op: LocalOp) -> tuple[LocalOp, Finish]:
    """Apply an update of one element in the shard that it falls into."""
    operand, update, *starts = op.operands
    for d, size in enumerate(op.in_shapes[0]):
        factor = _index_factor(op, d)
        if factor is None:
            continue
        index = int(np.clip(starts[d], 0, size - 1)) - op.shard.start(factor)
        if not 0 <= index < op.shard.size(factor):
            return op, lambda results: [operand]
        starts[d] = np.asarray(index, np.int32)
    return op.with_operands(operand, update, *starts), _as_is


def _ragged_dot(op: LocalOp) -> tuple[LocalOp, Finish]:
    """Count the rows of every group that lie in the shard."""
    x, other, sizes = op.operands
    (dim,) = op.params["ragged_dot_dimension_numbers"].lhs_ragged_dimensions
    for f in op.sharded_factors(0, dim):
        first = op.shard.start(f)
        ends = np.clip(np.cumsum(sizes, -1), first, first + op.shard.size(f))
        sizes = np.diff(ends, prepend=first).astype(sizes.dtype)
    return op.with_operands(x, other, sizes), _as_is


def _as_is(results: Results) -> Results:
    return results


def _slice(op: LocalOp) -> tuple[LocalOp, Finish]:
    """Slice the part that lies in the block; where the slice is narrow, that may be
    empty, and the rest is zero."""
    starts, limits = (list(op.params[k]) for k in ("start_indices", "limit_indices"))
    at = [0] * len(starts)
    for d, block in enumerate(op.operands[0].shape):
        for f in op.sharded_factors(0, d):
            factor = op.shard.rule.factors[f]
            first, last, begin = starts[d], limits[d], op.shard.start(f)
            if factor.kind is FactorKind.INDEX:
                starts[d] = min(max(first - begin, 0), block)
                limits[d] = min(max(last - begin, starts[d]), block)
                at[d] = min(max(begin - first, 0), last - first)
            elif factor.shift is not None:
                starts[d], limits[d] = 0, block
            else:  # slice up to the end, or by whole strides
                limits[d] = block - (op.in_shapes[0][d] - last)

    def among_zeros(results: Results) -> Results:
        (part,) = results
        if part.shape == op.out_shapes[0]:
            return results
        whole = np.zeros(op.out_shapes[0], part.dtype)
        places = zip(at, part.shape, strict=True)
        whole[tuple(slice(a, a + n) for a, n in places)] = part
        return [whole]

    local = op.with_params(start_indices=tuple(starts), limit_indices=tuple(limits))
    return local, among_zeros


def _pad(op: LocalOp) -> tuple[LocalOp, Finish]:
    """Pad the part of the operand that lies in the shard of the result."""
    config, (x, *rest) = list(op.params["padding_config"]), op.operands
    for d, dim in enumerate(op.shard.rule.results[0]):
        low, high, between = config[d]
        if not any(map(op.shard.is_sharded, dim)) or (low, high, between) == (0, 0, 0):
            continue
        size, (f,) = op.in_shapes[0][d], dim
        first, length = op.shard.start(f) - low, op.shard.size(f)
        if op.shard.rule.factors[f].shift is None:
            begin, end = (min(max(p, 0), size) for p in (first, first + length))
            x = x[(slice(None),) * d + (slice(begin, end),)]
        else:
            begin, end = op.shard.halo_range(f, size)
        step = between + 1
        before = begin * step - first if begin < end else length
        held = (end - begin - 1) * step + 1 if begin < end else 0
        config[d] = before, length - before - held, between
    return op.with_params(padding_config=tuple(config)).with_operands(x, *rest), _as_is


def _concatenate(op: LocalOp) -> tuple[LocalOp, Finish]:
    """Join the parts of the operands that lie in the shard of the result."""
    axis, rule = op.params["dimension"], op.shard.rule
    dim = rule.results[0][axis]
    if not any(map(op.shard.is_sharded, dim)):
        return op, _as_is
    (f,) = dim
    start = op.shard.start(f)
    stop = start + op.shard.size(f)
    sizes = [shape[axis] for shape in op.in_shapes]
    parts = []
    for i, (x, size, last) in enumerate(
        zip(op.operands, sizes, accumulate(sizes), strict=True)
    ):
        first = last - size
        begin, end = (min(max(p - first, 0), size) for p in (start, stop))
        is_cropped = f in rule.operands[i][axis]
        cut = slice(None) if is_cropped else slice(begin, end)
        parts.append(x[(slice(None),) * axis + (cut,)])
    return op.with_operands(*parts), _as_is


INDEXED: Mapping[str, Callable[[LocalOp], tuple[LocalOp, Finish]]] = {
    "gather": _gather,
    **dict.fromkeys(("scatter", "scatter-sub", "scatter_sub"), _scatter),
    **dict.fromkeys(REDUCERS, _scatter),
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "slice": _slice,
    "pad": _pad,
    "concatenate": _concatenate,
    **dict.fromkeys(RAGGED_DOTS, _ragged_dot),
}
"""Primitive that follows indices, or moves elements along a dim → function from its op
on a shard to the op to run, and to the function that finishes its results."""
