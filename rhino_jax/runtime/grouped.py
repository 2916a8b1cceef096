"""The grouped matmul of GPUs: a Pallas kernel that multiplies each group's own rows.

XLA:GPU multiplies all rows of a `ragged_dot` by the matrix of every group
(`rhino_jax.analysis.temporaries`). This kernel runs in Triton: a program multiplies one
tile of rows, which are of a single group, by a tile of that group's matrix; or, in the
gradient by matrices, sums the products of the rows of one group, tile by tile. A group
may start at any row, be empty, or have all rows; rows behind the last group are zero.
Sums are in float32; float32 operands at JAX's default precision are multiplied in TF32,
as XLA:GPU multiplies them.

Why neither XLA nor JAX: `xla_gpu_experimental_use_ragged_dot_fusion` calls cuDNN in
bfloat16 and float16 alone, from 9.22 on, and for gradients by matrices from 9.24 with
jax 0.12.0.1, with 0.10.2 never; without a driver it cannot be compiled. JAX's own
kernel in Triton is not in its wheels (`jax_ragged_dot_use_gpu_pallas_triton_lowering`);
those in Mosaic are for one generation each, and take whole tiles alone
(`jax.experimental.pallas.ops.gpu`). XLA:TPU has a kernel that skips other groups.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from rhino_jax._compat import bind_eqn
from rhino_jax.cost.grouped import MATRICES, ROWS, TILE_BYTES, group_tile
from rhino_jax.frontend.rules.dot import TiledDims, tiled_dims


_COLUMNS = 128
_STAGES = 3


def grouped_matmul(eqn: Any, operands: Sequence[Any], params: Any) -> list[Any]:
    """Run the equation of a grouped matmul that the kernel covers.

    Args:
      eqn: the equation.
      operands: its operands, or shards of them.
      params: its parameters on these operands.
    Returns:
      Its result, on GPUs by the kernel, elsewhere as XLA lowers it.
    """
    dims = tiled_dims(params, operands[0].ndim, operands[1].ndim)
    assert dims is not None
    run = functools.partial(
        tiled_product,
        dims=dims,
        precision=params["precision"],
        dtype=eqn.outvars[0].aval.dtype,
    )

    def as_written(*parts: Any) -> Any:
        return bind_eqn(eqn, parts, params)[0]

    return [lax.platform_dependent(*operands, cuda=run, default=as_written)]


def tiled_product(
    lhs: Any,
    rhs: Any,
    sizes: Any,
    *,
    dims: TiledDims,
    precision: Any,
    dtype: Any,
    interpret: bool = False,
) -> Any:
    """Return a grouped matmul, one kernel for each element of its leading dims.

    Args:
      lhs, rhs, sizes: operands of `jax.lax.ragged_dot_general`.
      dims: their dims.
      precision: see `jax.lax.Precision`.
      dtype: element type of the result.
      interpret: whether to run without a GPU, as JAX operations.
    """
    lhs, rhs = lhs.transpose(dims.lhs), rhs.transpose(dims.rhs)
    lead, batch = lhs.shape[:-2], lhs.shape[: dims.batch]
    sizes = jnp.broadcast_to(sizes.astype(jnp.int32), (*lead, sizes.shape[-1]))
    given = {"precision": precision, "interpret": interpret}

    def one(at: tuple[int, ...], dtype: Any) -> Any:
        if dims.of_matrices:
            return by_matrices(lhs[at], rhs[at], sizes[at], dtype=dtype, **given)
        own = rhs[at[: dims.batch]]
        turned = {"is_turned": dims.is_turned}
        return by_rows(lhs[at], own, sizes[at], dtype=dtype, **turned, **given)

    if not dims.of_matrices:
        parts = [one(at, dtype) for at in _positions(lead)]
        return jnp.stack(parts).reshape(*lead, *parts[0].shape)
    summed = _positions(lead[dims.batch :])
    kept = dtype if len(summed) == 1 else jnp.float32
    parts = [
        functools.reduce(jnp.add, [one((*at, *to), kept) for to in summed])
        for at in _positions(batch)
    ]
    groups, *matrix = parts[0].shape
    return jnp.stack(parts, 1).reshape(groups, *batch, *matrix).astype(dtype)


def _positions(shape: Sequence[int]) -> list[tuple[int, ...]]:
    return list(itertools.product(*map(range, shape)))


def by_rows(
    x: Any,
    w: Any,
    sizes: Any,
    *,
    dtype: Any,
    is_turned: bool = False,
    precision: Any = None,
    interpret: bool = False,
) -> Any:
    """Return rows [M, N]: each row of x [M, K] times the matrix of its group.

    Args:
      x: rows, sorted by group.
      w: matrices [G, K, N]; turned: [G, N, K].
      sizes: rows of each group [G], int32.
      dtype, precision, interpret: as in `tiled_product`.
      is_turned: whether the matrices are transposed.
    """
    (rows, depth), groups = x.shape, w.shape[0]
    columns = w.shape[1 if is_turned else 2]
    item = x.dtype.itemsize
    tile = int(group_tile(rows, groups, item, of_matrices=False))
    block = tile, min(_power(depth), TILE_BYTES // item), _columns(columns)
    tiles = _tiles(sizes, rows, tile)
    kernel = functools.partial(
        _rows_kernel,
        block=block,
        shape=(depth, columns, groups),
        is_turned=is_turned,
        precision=precision,
    )
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((rows, columns), dtype),
        grid=(tiles[0].shape[0], pl.cdiv(columns, block[2])),
        compiler_params=_params(tile * block[2]),
        interpret=interpret,
        name=ROWS,
    )(*tiles, x, w)


def _tiles(sizes: Any, rows: int, tile: int) -> tuple[Any, Any, Any]:
    """Return the first row, the row after the last, and the group of each tile.

    Each boundary of groups may add a tile. Rows behind the last group are a group of
    their own. Tiles beyond the last one are empty.
    """
    groups = sizes.shape[0]
    ends = jnp.minimum(jnp.append(jnp.cumsum(sizes), rows), rows).astype(jnp.int32)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]])
    counts = (ends - starts + tile - 1) // tile
    last = jnp.cumsum(counts).astype(jnp.int32)
    number = jnp.arange(pl.cdiv(rows, tile) + groups, dtype=jnp.int32)
    group = jnp.sum(last[None] <= number[:, None], 1, dtype=jnp.int32)
    group = jnp.minimum(group, groups)
    first = starts[group] + (number - last[group] + counts[group]) * tile
    return first, jnp.minimum(first + tile, ends[group]), group


def _rows_kernel(
    first_ref: Any,
    stop_ref: Any,
    group_ref: Any,
    x_ref: Any,
    w_ref: Any,
    out_ref: Any,
    *,
    block: tuple[int, int, int],
    shape: tuple[int, int, int],
    is_turned: bool,
    precision: Any,
) -> None:
    tile, inner, wide = block
    depth, columns, groups = shape
    at = pl.program_id(0)
    first, stop, group = first_ref[at], stop_ref[at], group_ref[at]
    own, across = first + _span(0, tile), _span(pl.program_id(1), wide)
    mine, inside = own < stop, across < columns

    def add(i: Any, total: Any) -> Any:
        along = _span(i, inner)
        left = along < depth
        x = _read(x_ref.at[own[:, None], along[None]], mine, left)
        if is_turned:
            w = _read(w_ref.at[group, across[:, None], along[None]], inside, left)
            return total + _product(x, w, (1, 1), precision)
        w = _read(w_ref.at[group, along[:, None], across[None]], left, inside)
        return total + _product(x, w, (1, 0), precision)

    @pl.when(first < stop)
    def _() -> None:
        trips = jnp.where(group < groups, jnp.int32(pl.cdiv(depth, inner)), 0)
        total = lax.fori_loop(jnp.int32(0), trips, add, _zeros(tile, wide))
        _write(out_ref.at[own[:, None], across[None]], total, mine, inside)


def by_matrices(
    x: Any,
    y: Any,
    sizes: Any,
    *,
    dtype: Any,
    precision: Any = None,
    interpret: bool = False,
) -> Any:
    """Return matrices [G, K, N]: the sum of x[row]ᵀ y[row] over the rows of each group.

    Args:
      x, y: rows [M, K] and [M, N], sorted by group.
      sizes: rows of each group [G], int32.
      dtype, precision, interpret: as in `tiled_product`.
    """
    (rows, depth), columns, groups = x.shape, y.shape[1], sizes.shape[0]
    tile = int(group_tile(rows, groups, x.dtype.itemsize, of_matrices=True))
    block = tile, _columns(depth), _columns(columns)
    ends = jnp.minimum(jnp.cumsum(sizes), rows).astype(jnp.int32)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]])
    kernel = functools.partial(
        _matrices_kernel, block=block, shape=(depth, columns), precision=precision
    )
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((groups, depth, columns), dtype),
        grid=(groups, pl.cdiv(depth, block[1]), pl.cdiv(columns, block[2])),
        compiler_params=_params(block[1] * block[2]),
        interpret=interpret,
        name=MATRICES,
    )(starts, ends, x, y)


def _matrices_kernel(
    start_ref: Any,
    end_ref: Any,
    x_ref: Any,
    y_ref: Any,
    out_ref: Any,
    *,
    block: tuple[int, int, int],
    shape: tuple[int, int],
    precision: Any,
) -> None:
    tile, high, wide = block
    group = pl.program_id(0)
    start, end = start_ref[group], end_ref[group]
    down, across = _span(pl.program_id(1), high), _span(pl.program_id(2), wide)
    above, inside = down < shape[0], across < shape[1]

    def add(i: Any, total: Any) -> Any:
        own = start + _span(i, tile)
        mine = own < end
        x = _read(x_ref.at[own[:, None], down[None]], mine, above)
        y = _read(y_ref.at[own[:, None], across[None]], mine, inside)
        return total + _product(x, y, (0, 0), precision)

    trips = (end - start + tile - 1) // tile
    total = lax.fori_loop(jnp.int32(0), trips, add, _zeros(high, wide))
    _write(out_ref.at[group, down[:, None], across[None]], total, above, inside)


def _span(position: Any, length: int) -> Any:
    """Return the indices of one block."""
    return position * length + jnp.arange(length, dtype=jnp.int32)


def _zeros(*shape: int) -> Any:
    return jnp.zeros(shape, jnp.float32)


def _read(place: Any, rows: Any, columns: Any) -> Any:
    return triton.load(place, mask=rows[:, None] & columns[None], other=0)


def _write(place: Any, value: Any, rows: Any, columns: Any) -> None:
    value = value.astype(place.dtype)
    triton.store(place, value, mask=rows[:, None] & columns[None])


def _product(x: Any, y: Any, dims: tuple[int, int], precision: Any) -> Any:
    contracted = ((dims[0],), (dims[1],)), ((), ())
    return lax.dot_general(
        x, y, contracted, precision, preferred_element_type=jnp.float32
    )


def _columns(size: int) -> int:
    return min(_power(size), _COLUMNS)


def _power(size: int) -> int:
    """Return the smallest power of two that is at least `size`, and at least 16."""
    return max(16, 1 << math.ceil(math.log2(size)))


def _params(results: int) -> Any:
    """Return the parameters of a kernel whose programs have that many results."""
    warps = 8 if results > 64 * _COLUMNS else 4
    return triton.CompilerParams(num_warps=warps, num_stages=_STAGES)
