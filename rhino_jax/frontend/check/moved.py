"""Slices, pads and concatenations on one shard: the part of the elements that they
move."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import accumulate

import numpy as np

from rhino_jax.frontend.check.op import Finish, LocalOp, Results
from rhino_jax.ir.factor import FactorKind


def _slice(op: LocalOp) -> tuple[LocalOp, Finish]:
    """Slice the part that lies in the block; where the slice is narrow, that may be
    empty, and the rest is zero."""
    starts, limits = (list(op.params[k]) for k in ("start_indices", "limit_indices"))
    at = [0] * len(starts)
    for d, block in enumerate(op.operands[0].shape):
        for f in op.cut_factors(0, d):
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
        if not any(map(op.shard.is_cut, dim)) or (low, high, between) == (0, 0, 0):
            continue
        size, (f,) = op.in_shapes[0][d], dim
        first, length = op.shard.start(f) - low, op.shard.size(f)
        begin, end = (min(max(p, 0), size) for p in (first, first + length))
        if op.shard.rule.factors[f].shift is None:
            x = x[(slice(None),) * d + (slice(begin, end),)]
        before = begin - first if begin < end else length
        config[d] = before, length - before - (end - begin), 0
    return op.with_params(padding_config=tuple(config)).with_operands(x, *rest), _as_is


def _concatenate(op: LocalOp) -> tuple[LocalOp, Finish]:
    """Join the parts of the operands that lie in the shard of the result."""
    axis, rule = op.params["dimension"], op.shard.rule
    dim = rule.results[0][axis]
    if not any(map(op.shard.is_cut, dim)):
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


def _as_is(results: Results) -> Results:
    return results


MOVED: Mapping[str, Callable[[LocalOp], tuple[LocalOp, Finish]]] = {
    "slice": _slice,
    "pad": _pad,
    "concatenate": _concatenate,
}
"""Primitive that moves elements along a dim → function from its op on a shard to the op
to run, and to the function that finishes its results."""
