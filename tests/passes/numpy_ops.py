"""Primitives of JAX in NumPy, for `interpreter`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.lax import GatherScatterMode
from scipy import special


def _windows(
    shape: Sequence[int],
    indices: Any,
    sizes: Sequence[int],
    starts_of: Sequence[int],
    batched: dict[int, int],
    mode: Any,
) -> tuple[tuple[Any, ...], Any]:
    """Indices of windows of an operand, [*batch, *window], and which are inside.

    Args:
      shape: the operand's.
      indices: starts, [*batch, len(starts_of)].
      sizes: of a window, for every dim of the operand.
      starts_of: the dims that `indices` say.
      batched: dim of the operand → dim of the batch that it goes along with.
      mode: clipped or not.
    """
    batch, rank = indices.shape[:-1], len(shape)
    inside, found = np.ones(batch, bool), []
    for d, (size, whole) in enumerate(zip(sizes, shape, strict=True)):
        start = np.zeros(batch, np.int64)
        if d in starts_of:
            start = indices[..., starts_of.index(d)].astype(np.int64)
        elif d in batched:
            axes = [1] * len(batch)
            axes[batched[d]] = -1
            start = start + np.arange(whole).reshape(axes)
        clipped = np.clip(start, 0, whole - size)
        if mode is not GatherScatterMode.CLIP:
            inside &= clipped == start
        at = [1] * rank
        at[d] = size
        found.append(clipped.reshape(*batch, *[1] * rank) + np.arange(size).reshape(at))
    return tuple(found), inside


def _gather(args: list[Any], params: Any, aval: Any) -> Any:
    (x, indices), dims = args, params["dimension_numbers"]
    dropped = {*dims.collapsed_slice_dims, *dims.operand_batching_dims}
    batched = dict(
        zip(dims.operand_batching_dims, dims.start_indices_batching_dims, strict=True)
    )
    sizes, mode = params["slice_sizes"], GatherScatterMode.from_any(params["mode"])
    at, inside = _windows(x.shape, indices, sizes, dims.start_index_map, batched, mode)
    made = x[at]
    if not inside.all():
        fill = params["fill_value"]
        if fill is None:
            is_float = np.issubdtype(x.dtype, np.inexact)
            fill = np.nan if is_float else np.iinfo(x.dtype).min
        made = np.where(inside.reshape(*inside.shape, *[1] * x.ndim), made, fill)
    batch = inside.ndim
    window = [n for d, n in enumerate(sizes) if d not in dropped]
    made = made.reshape((*made.shape[:batch], *window))
    rest = [d for d in range(made.ndim) if d not in dims.offset_dims]
    order = [*rest, *dims.offset_dims]
    return made.transpose(np.argsort(order)).astype(x.dtype)


def _scatter(combine: Any) -> Callable[..., Any]:
    def run(args: list[Any], params: Any, aval: Any) -> Any:
        (x, indices, updates), dims = args, params["dimension_numbers"]
        window = dims.update_window_dims
        inserted = {*dims.inserted_window_dims, *dims.operand_batching_dims}
        rest = [d for d in range(updates.ndim) if d not in window]
        updates = updates.transpose([*rest, *window])
        given = iter(updates.shape[len(rest) :])
        sizes = [1 if d in inserted else next(given) for d in range(x.ndim)]
        updates = updates.reshape((*updates.shape[: len(rest)], *sizes))
        batched = dict(
            zip(
                dims.operand_batching_dims,
                dims.scatter_indices_batching_dims,
                strict=True,
            )
        )
        mode = GatherScatterMode.from_any(params["mode"])
        starts_of = dims.scatter_dims_to_operand_dims
        at, inside = _windows(x.shape, indices, sizes, starts_of, batched, mode)
        out = np.array(x)
        at = tuple(np.broadcast_to(a, updates.shape)[inside] for a in at)
        combine(out, at, updates[inside])
        return out

    return run


def _dot_general(args: list[Any], params: Any, aval: Any) -> Any:
    x, y = args
    (x_sum, y_sum), (x_batch, y_batch) = params["dimension_numbers"]
    dtype = aval.dtype
    x, y = (v.astype(_wide(dtype), copy=False) for v in (x, y))
    return _product(x, y, (x_sum, y_sum), (x_batch, y_batch)).astype(dtype)


def _product(x: Any, y: Any, inside: Any, batched: Any = ((), ())) -> Any:
    """Sum products over the dims `inside` of both, along those of `batched`."""
    (x_sum, y_sum), (x_batch, y_batch) = inside, batched
    x_own = [d for d in range(x.ndim) if d not in (*x_sum, *x_batch)]
    y_own = [d for d in range(y.ndim) if d not in (*y_sum, *y_batch)]
    batch = [x.shape[d] for d in x_batch]
    own = [*(x.shape[d] for d in x_own), *(y.shape[d] for d in y_own)]
    m, k, n = (
        math.prod(of.shape[d] for d in dims)
        for of, dims in ((x, x_own), (x, x_sum), (y, y_own))
    )
    left = x.transpose([*x_batch, *x_own, *x_sum]).reshape(*batch, m, k)
    right = y.transpose([*y_batch, *y_sum, *y_own]).reshape(*batch, k, n)
    rows = max(_ONE_CORE // max(k * n, 1), 1)
    parts = [left[..., i : i + rows, :] @ right for i in range(0, max(m, 1), rows)]
    return np.concatenate(parts, -2).reshape((*batch, *own))


_ONE_CORE = 2**18
"""Larger products run on all cores (OpenBLAS's `GEMM_MULTITHREAD_THRESHOLD`), whose
waiting for each other costs more than these tests' products."""


def _pad(args: list[Any], params: Any, aval: Any) -> Any:
    return _padded(*args, params["padding_config"], aval.shape)


def _padded(x: Any, value: Any, config: Any, shape: Sequence[int]) -> Any:
    made = np.full(shape, value, x.dtype)
    into, of = [], []
    for (low, _, inside), n, size in zip(config, x.shape, shape, strict=True):
        places = low + (inside + 1) * np.arange(n)
        kept = np.flatnonzero((places >= 0) & (places < size))
        into.append(places[kept])
        of.append(kept)
    made[np.ix_(*into)] = x[np.ix_(*of)]
    return made


def _convolution(args: list[Any], params: Any, aval: Any) -> Any:
    dims, count = params["dimension_numbers"], len(params["window_strides"])
    x, w = args[0].transpose(dims.lhs_spec), args[1].transpose(dims.rhs_spec)
    border = [
        (low, high, n - 1)
        for (low, high), n in zip(
            params["padding"], params["lhs_dilation"], strict=True
        )
    ]
    space = tuple(range(2, 2 + count))
    padded = [
        (n - 1) * (inside + 1) + 1 + low + high
        for n, (low, high, inside) in zip(x.shape[2:], border, strict=True)
    ]
    x = _padded(x, x.dtype.type(0), [(0, 0, 0)] * 2 + border, (*x.shape[:2], *padded))
    dilation = params["rhs_dilation"]
    kernel = [(n - 1) * d + 1 for n, d in zip(w.shape[2:], dilation, strict=True)]
    x = np.lib.stride_tricks.sliding_window_view(x, kernel, space)
    steps = (*params["window_strides"], *dilation)
    x = x[(slice(None), slice(None), *(slice(None, None, n) for n in steps))]
    groups, batches = params["feature_group_count"], params["batch_group_count"]
    inside = (1, *range(2 + count, 2 + 2 * count)), (1, *space)
    xs = np.split(x, groups, 1) if batches == 1 else np.split(x, batches, 0)
    ws = np.split(w, groups * batches, 0)
    parts = [_product(a, b, inside) for a, b in zip(xs, ws, strict=True)]
    made = np.concatenate([np.moveaxis(part, -1, 1) for part in parts], 1)
    return made.transpose(np.argsort(dims.out_spec))


def _broadcast_in_dim(args: list[Any], params: Any, aval: Any) -> Any:
    x, shape = args[0], [1] * len(aval.shape)
    for d, n in zip(params["broadcast_dimensions"], x.shape, strict=True):
        shape[d] = n
    return np.broadcast_to(np.reshape(x, shape), aval.shape)


def _reshape(args: list[Any], params: Any, aval: Any) -> Any:
    order = params["dimensions"]
    return np.reshape(
        args[0] if order is None else args[0].transpose(order), aval.shape
    )


def _starts(x: Any, starts: Sequence[Any], sizes: Sequence[int]) -> tuple[slice, ...]:
    at = [
        min(max(int(s), 0), n - size)
        for s, n, size in zip(starts, x.shape, sizes, strict=True)
    ]
    return tuple(slice(s, s + size) for s, size in zip(at, sizes, strict=True))


def _dynamic_slice(args: list[Any], params: Any, aval: Any) -> Any:
    x, *starts = args
    return x[_starts(x, starts, params["slice_sizes"])]


def _dynamic_update_slice(args: list[Any], params: Any, aval: Any) -> Any:
    x, update, *starts = args
    made = np.array(x)
    made[_starts(x, starts, update.shape)] = update
    return made


def _cumulative(op: Any) -> Callable[..., Any]:
    def run(args: list[Any], params: Any, aval: Any) -> Any:
        axis = params["axis"]
        x = np.flip(args[0], axis) if params["reverse"] else args[0]
        made = op(x.astype(_wide(x.dtype), copy=False), axis).astype(x.dtype)
        return np.flip(made, axis) if params["reverse"] else made

    return run


def _sort(args: list[Any], params: Any, aval: Any) -> Any:
    axis = params["dimension"]
    keys = args[: params["num_keys"]]
    order = np.lexsort(keys[::-1], axis)
    return [np.take_along_axis(x, order, axis) for x in args]


def _split(args: list[Any], params: Any, aval: Any) -> Any:
    ends = [*itertools.accumulate(params["sizes"])][:-1]
    return list(np.split(args[0], ends, params["axis"]))


def _slice(args: list[Any], params: Any, aval: Any) -> Any:
    strides = params["strides"] or (None,) * args[0].ndim
    ends = params["start_indices"], params["limit_indices"], strides
    return args[0][tuple(slice(*at) for at in zip(*ends, strict=True))]


def _select_n(args: list[Any], params: Any, aval: Any) -> Any:
    which, *cases = args
    if which.dtype == bool:
        return np.where(which, cases[1], cases[0])
    return np.choose(which, cases)


def _integer_pow(args: list[Any], params: Any, aval: Any) -> Any:
    x, y = args[0], params["y"]
    return x**y if y >= 0 else x.dtype.type(1) / x**-y


def _iota(args: list[Any], params: Any, aval: Any) -> Any:
    shape = [1] * len(aval.shape)
    shape[params["dimension"]] = -1
    line = np.arange(aval.shape[params["dimension"]], dtype=aval.dtype)
    return np.broadcast_to(line.reshape(shape), aval.shape)


def _convert(args: list[Any], params: Any, aval: Any) -> Any:
    return args[0].astype(aval.dtype)


def _elementwise(fn: Any) -> Callable[..., Any]:
    return lambda args, params, aval: fn(*args).astype(aval.dtype)


def _compared(fn: Any) -> Callable[..., Any]:
    return lambda args, params, aval: fn(*args)


def _wide(dtype: Any) -> Any:
    """Return the dtype in which values of a dtype are summed."""
    is_narrow = jax.numpy.issubdtype(dtype, np.floating) and dtype.itemsize < 4
    return np.dtype(np.float32) if is_narrow else dtype


def _reduced(fn: Any) -> Callable[..., Any]:
    def run(args: list[Any], params: Any, aval: Any) -> Any:
        x = args[0].astype(_wide(aval.dtype), copy=False)
        return np.asarray(fn(x, axis=tuple(params["axes"])), aval.dtype)

    return run


def _arg(fn: Any) -> Callable[..., Any]:
    def run(args: list[Any], params: Any, aval: Any) -> Any:
        (axis,) = params["axes"]
        return fn(args[0], axis).astype(params["index_dtype"])

    return run


def _divided(x: Any, y: Any) -> Any:
    return x / y if np.issubdtype(x.dtype, np.inexact) else np.trunc(x / y)


def _same(args: list[Any], params: Any, aval: Any) -> list[Any]:
    return list(args)


OPS: dict[str, Callable[[list[Any], Any, Any], Any]] = {
    **{
        name: _elementwise(fn)
        for name, fn in {
            "add": np.add, "add_any": np.add, "sub": np.subtract, "mul": np.multiply,
            "div": _divided, "rem": np.fmod, "max": np.maximum, "min": np.minimum,
            "neg": np.negative, "abs": np.abs, "sign": np.sign, "floor": np.floor,
            "ceil": np.ceil, "exp": np.exp, "exp2": np.exp2, "expm1": np.expm1,
            "log": np.log, "log1p": np.log1p, "sin": np.sin, "cos": np.cos,
            "tanh": np.tanh, "sqrt": np.sqrt, "square": np.square, "pow": np.power,
            "rsqrt": lambda x: 1 / np.sqrt(x), "logistic": special.expit,
            "erf": special.erf, "erf_inv": special.erfinv, "atan2": np.arctan2,
            "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
            "not": np.invert,
            "clamp": lambda low, x, high: np.clip(x, low, high),
        }.items()
    },
    **{
        name: _compared(fn)
        for name, fn in {
            "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal,
            "gt": np.greater, "ge": np.greater_equal, "is_finite": np.isfinite,
        }.items()
    },
    **{
        name: _reduced(fn)
        for name, fn in {
            "reduce_sum": np.sum, "reduce_max": np.max, "reduce_min": np.min,
            "reduce_prod": np.prod, "reduce_and": np.all, "reduce_or": np.any,
        }.items()
    },
    "argmax": _arg(np.argmax),
    "argmin": _arg(np.argmin),
    "cumsum": _cumulative(np.cumsum),
    "cumprod": _cumulative(np.cumprod),
    "cummax": _cumulative(np.maximum.accumulate),
    "broadcast_in_dim": _broadcast_in_dim,
    "concatenate": lambda args, params, aval: np.concatenate(args, params["dimension"]),
    "conv_general_dilated": _convolution,
    "convert_element_type": _convert,
    "copy": _same,
    "copy_p": _same,
    "device_put": _same,
    "dot_general": _dot_general,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "gather": _gather,
    "integer_pow": _integer_pow,
    "iota": _iota,
    "name": _same,
    "optimization_barrier": _same,
    "pad": _pad,
    "pvary": _same,
    "reshape": _reshape,
    "rev": lambda args, params, aval: np.flip(args[0], params["dimensions"]),
    "scatter": _scatter(lambda out, at, x: out.__setitem__(at, x)),
    "scatter-add": _scatter(np.add.at),
    "scatter_add": _scatter(np.add.at),
    "select_n": _select_n,
    "sharding_constraint": _same,
    "slice": _slice,
    "sort": _sort,
    "split": _split,
    "squeeze": lambda args, params, aval: np.reshape(args[0], aval.shape),
    "stop_gradient": _same,
    "transpose": lambda args, params, aval: args[0].transpose(params["permutation"]),
}  # fmt: skip
"""Primitive → function of its operands, its parameters and the first result's aval."""
