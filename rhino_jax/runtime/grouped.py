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
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from rhino_jax._compat import bind_eqn
from rhino_jax.cost.grouped import MATRICES, ROWS, TILES, group_tile
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

    @jax.custom_jvp
    def product(*parts: Any) -> Any:
        return lax.platform_dependent(*parts, cuda=run, default=as_written)

    @product.defjvp
    def _(primals: Any, tangents: Any) -> tuple[Any, Any]:
        # Of `jax.grad` around a planned function; kernels have no transpose.
        return product(*primals), jax.jvp(as_written, primals, tangents)[1]

    return [product(*operands)]


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
    """Return a grouped matmul, by one kernel.

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
    sets = math.prod(lead[dims.batch :])
    run = functools.partial(
        by_matrices if dims.of_matrices else by_rows,
        dtype=dtype,
        precision=precision,
        interpret=interpret,
    )
    sizes = sizes.reshape(-1, sets, sizes.shape[-1])
    lhs = lhs.reshape(-1, sets, *lhs.shape[-2:])
    if dims.of_matrices:
        made = run(lhs, rhs.reshape(-1, sets, *rhs.shape[-2:]), sizes)
        return made.reshape(made.shape[0], *batch, *made.shape[2:])
    rhs = rhs.reshape(-1, *rhs.shape[-3:])
    made = run(lhs, rhs, sizes, is_turned=dims.is_turned)
    return made.reshape(*lead, *made.shape[-2:])


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
    """Return rows [B, S, M, N]: each row of x [B, S, M, K] times the matrix of its
    group.

    Args:
      x: B batches of S sets of rows, each sorted by group.
      w: matrices [B, G, K, N]; turned: [B, G, N, K].
      sizes: rows of each group [B, S, G], int32.
      dtype, precision, interpret: as in `tiled_product`.
      is_turned: whether the matrices are transposed.
    """
    *lead, rows, depth = x.shape
    groups, item = sizes.size, x.dtype.itemsize
    columns = w.shape[2 if is_turned else 3]
    x, w = x.reshape(-1, depth), w.reshape(-1, *w.shape[2:])
    tile = int(group_tile(len(x), groups, item, of_matrices=False))
    block = tile, min(_power(depth), TILES.bytes // item), _columns(columns)
    tiles = _tiles(sizes, rows, tile)
    kernel = functools.partial(
        _rows_kernel,
        block=block,
        shape=(depth, columns),
        is_turned=is_turned,
        precision=precision,
    )
    made = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((len(x), columns), dtype),
        grid=(tiles[0].shape[0], pl.cdiv(columns, block[2])),
        compiler_params=_params(tile * block[2]),
        interpret=interpret,
        name=f"{ROWS}_{groups}",
    )(*tiles, x, w)
    return made.reshape(*lead, rows, columns)


def _tiles(sizes: Any, rows: int, tile: int) -> tuple[Any, Any, Any]:
    """Return the first row, the row after the last, and the matrix of each tile.

    Each boundary of groups may add a tile. Rows behind the last group of a set are a
    group of their own, with the matrix -1. Tiles beyond the last one are empty.

    Args:
      sizes: rows of each group [B, S, G].
      rows: rows of each set.
      tile: rows of a tile.
    """
    batches, sets, groups = sizes.shape
    ends = jnp.minimum(jnp.cumsum(sizes, -1), rows)
    ends = jnp.pad(ends, [(0, 0), (0, 0), (0, 1)], constant_values=rows)
    base = _span(0, batches * sets) * rows
    ends = (ends.reshape(-1, groups + 1) + base[:, None]).ravel().astype(jnp.int32)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]])
    counts = (ends - starts + tile - 1) // tile
    last = jnp.cumsum(counts).astype(jnp.int32)
    number = _span(0, pl.cdiv(batches * sets * rows, tile) + len(ends) - 1)
    group = jnp.sum(last[None] <= number[:, None], 1, dtype=jnp.int32)
    group = jnp.minimum(group, len(ends) - 1)
    first = starts[group] + (number - last[group] + counts[group]) * tile
    own, batch = group % (groups + 1), group // (groups + 1) // sets
    matrix = jnp.where(own < groups, batch * groups + own, -1)
    return first, jnp.minimum(first + tile, ends[group]), matrix


def _rows_kernel(
    first_ref: Any,
    stop_ref: Any,
    matrix_ref: Any,
    x_ref: Any,
    w_ref: Any,
    out_ref: Any,
    *,
    block: tuple[int, int, int],
    shape: tuple[int, int],
    is_turned: bool,
    precision: Any,
) -> None:
    tile, inner, wide = block
    depth, columns = shape
    at = pl.program_id(0)
    first, stop, matrix = first_ref[at], stop_ref[at], matrix_ref[at]
    own, across = first + _span(0, tile), _span(pl.program_id(1), wide)
    mine, inside = own < stop, across < columns

    def add(i: Any, total: Any) -> Any:
        along = _span(i, inner)
        left = along < depth
        x = _read(x_ref.at[own[:, None], along[None]], mine, left)
        if is_turned:
            w = _read(w_ref.at[matrix, across[:, None], along[None]], inside, left)
            return total + _product(x, w, (1, 1), precision)
        w = _read(w_ref.at[matrix, along[:, None], across[None]], left, inside)
        return total + _product(x, w, (1, 0), precision)

    @pl.when(first < stop)
    def _() -> None:
        trips = jnp.where(matrix >= 0, jnp.int32(pl.cdiv(depth, inner)), 0)
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
    """Return matrices [G, B, K, N]: the sum of x[row]ᵀ y[row] over the rows of each
    group, in all sets.

    Args:
      x, y: B batches of S sets of rows, [B, S, M, K] and [B, S, M, N], each sorted by
        group.
      sizes: rows of each group [B, S, G], int32.
      dtype, precision, interpret: as in `tiled_product`.
    """
    (batches, sets, groups), (rows, depth) = sizes.shape, x.shape[-2:]
    columns, item = y.shape[-1], x.dtype.itemsize
    x, y = x.reshape(-1, depth), y.reshape(-1, columns)
    tile = int(group_tile(len(x), sizes.size, item, of_matrices=True))
    block = tile, _columns(depth), _columns(columns)
    base = _span(0, batches * sets).reshape(batches, sets, 1) * rows
    ends = jnp.minimum(jnp.cumsum(sizes, -1), rows).astype(jnp.int32)
    starts = jnp.pad(ends[..., :-1], [(0, 0), (0, 0), (1, 0)])
    # [groups, batches, sets]: a program's sets lie side by side.
    spans = [(base + z).transpose(2, 0, 1).ravel() for z in (starts, ends)]
    kernel = functools.partial(
        _matrices_kernel,
        block=block,
        shape=(sets, depth, columns),
        precision=precision,
    )
    made = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((groups * batches, depth, columns), dtype),
        grid=(groups * batches, pl.cdiv(depth, block[1]), pl.cdiv(columns, block[2])),
        compiler_params=_params(block[1] * block[2]),
        interpret=interpret,
        name=f"{MATRICES}_{sizes.size}",
    )(*spans, x, y)
    return made.reshape(groups, batches, depth, columns)


def _matrices_kernel(
    start_ref: Any,
    end_ref: Any,
    x_ref: Any,
    y_ref: Any,
    out_ref: Any,
    *,
    block: tuple[int, int, int],
    shape: tuple[int, int, int],
    precision: Any,
) -> None:
    tile, high, wide = block
    sets, depth, columns = shape
    matrix = pl.program_id(0)
    down, across = _span(pl.program_id(1), high), _span(pl.program_id(2), wide)
    above, inside = down < depth, across < columns

    def add_set(number: Any, total: Any) -> Any:
        start, end = (ref[matrix * sets + number] for ref in (start_ref, end_ref))

        def add(i: Any, total: Any) -> Any:
            own = start + _span(i, tile)
            mine = own < end
            x = _read(x_ref.at[own[:, None], down[None]], mine, above)
            y = _read(y_ref.at[own[:, None], across[None]], mine, inside)
            return total + _product(x, y, (0, 0), precision)

        trips = (end - start + tile - 1) // tile
        return lax.fori_loop(jnp.int32(0), trips, add, total)

    total = _zeros(high, wide)
    if sets == 1:
        total = add_set(0, total)
    else:
        total = lax.fori_loop(jnp.int32(0), jnp.int32(sets), add_set, total)
    _write(out_ref.at[matrix, down[:, None], across[None]], total, above, inside)


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
