"""Emit the ops of a loop on one micro-batch, regions included.

Rows of each micro-batch: slice arrays into micro-batches and reassemble them; and
outputs of micro-batches, accumulated one after the other.

Micro-batch i of m equal ones has the rows i, i + m, i + 2m, …: where the batch is
sharded over devices, each then has its share of every micro-batch and no data moves.
(Of contiguous micro-batches, all but a few devices would have no rows; XLA moves the
whole batch for these.) Remaining rows form one smaller micro-batch of the last rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax.numpy as jnp
from jax import lax

from rhino_jax._compat import bind_eqn
from rhino_jax.errors import MicrobatchError
from rhino_jax.frontend.registry import part_of
from rhino_jax.frontend.rules.reduce import COMBINE, identity
from rhino_jax.frontend.rules.shape import of_blocks
from rhino_jax.ir.axes import AxisSpan
from rhino_jax.ir.program import RegionKind
from rhino_jax.passes.microbatch.cut import LoopCrossing, MicrobatchLoop
from rhino_jax.passes.microbatch.flow.analysis import FlowResult
from rhino_jax.passes.microbatch.flow.evaluated import (
    operands_cut,
    spot_of,
)
from rhino_jax.passes.microbatch.flow.ops import Ran
from rhino_jax.passes.microbatch.flow.states import (
    Partial,
    RowsState,
    State,
    WholeState,
    is_there,
)
from rhino_jax.passes.region_walk import run_region, run_regions
from rhino_jax.rewrite.emit import bind_local
from rhino_jax.rewrite.flat import FlatOp, FlatRegion


@dataclass(frozen=True, slots=True)
class Split:
    """A batch divided into micro-batches.

    Attributes:
      rows: rows of the batch.
      piece: rows of a full micro-batch.
      full: number of full micro-batches.
      rest: rows of a last, smaller micro-batch; 0: there is none.
    """

    rows: int
    piece: int
    full: int
    rest: int

    @classmethod
    def of(cls, rows: int, count: int) -> Split:
        """Divide `rows` rows into at most `count` micro-batches."""
        piece = -(-rows // count)
        return cls(rows, piece, rows // piece, rows % piece)

    @property
    def count(self) -> int:
        """Number of micro-batches that run."""
        return self.full + (self.rest > 0)


@dataclass(frozen=True, slots=True)
class Piece:
    """A micro-batch: the rows `start + stride · j`, j below `rows`.

    Attributes:
      split: how the batch is divided.
      index: position among the full micro-batches, traced; None: the last, smaller one.
    """

    split: Split
    index: Any

    @property
    def rows(self) -> int:
        """Number of rows of the micro-batch."""
        return self.split.rest if self.index is None else self.split.piece

    @property
    def stride(self) -> int:
        """Distance in the batch between consecutive rows of the micro-batch."""
        return 1 if self.index is None else self.split.full

    @property
    def start(self) -> Any:
        """First row of the micro-batch, traced."""
        return self.split.rows - self.split.rest if self.index is None else self.index

    @property
    def share(self) -> float:
        """Share of the batch's rows."""
        return self.rows / self.split.rows

    @property
    def is_first(self) -> Any:
        """Return whether this is the first micro-batch, as a traced boolean scalar."""
        return jnp.zeros((), bool) if self.index is None else self.index == 0

    def of(self, x: Any, span: AxisSpan) -> Any:
        """Return the micro-batch of a full array."""
        return self.take(view(x, span, self.split), span)

    def take(self, viewed: tuple[Any, Any], span: AxisSpan) -> Any:
        """Return the micro-batch of an array from its `view`."""
        full, rest = viewed
        if self.index is None:
            return rest
        at = lax.dynamic_index_in_dim(full, self.index, span.dim + 2, keepdims=False)
        return _merged(at, span.dim)


def view(x: Any, span: AxisSpan, split: Split) -> tuple[Any, Any]:
    """Reshape an array so that micro-batches are indices of one dim.

    Returns:
      [.., outer, rows of a micro-batch, micro-batches, inner, ..], and the last,
      smaller micro-batch, if any.
    """
    d, even = span.dim, split.piece * split.full
    apart = jnp.reshape(x, span.split(x.shape, split.rows))
    rest = None
    if split.rest:
        rest = _merged(lax.slice_in_dim(apart, even, split.rows, axis=d + 1), d)
        apart = lax.slice_in_dim(apart, 0, even, axis=d + 1)
    return jnp.reshape(apart, span.split(x.shape, split.piece, split.full)), rest


def _merged(x: Any, dim: int) -> Any:
    """Merge the three dims (outer, rows, inner) from `dim` on into one."""
    size = x.shape[dim] * x.shape[dim + 1] * x.shape[dim + 2]
    return jnp.reshape(x, (*x.shape[:dim], size, *x.shape[dim + 3 :]))


def together(stack: Any, rest: Any, span: AxisSpan, split: Split) -> Any:
    """Reassemble an array from its micro-batches.

    Args:
      stack: the full micro-batches, stacked along a new first dim.
      rest: the last, smaller micro-batch; None: there is none.
      span: the dim that holds the batch.
      split: how the batch is divided.
    """
    d, shape = span.dim, stack.shape[1:]
    apart = jnp.reshape(stack, (split.full, *span.split(shape, split.piece)))
    apart = jnp.moveaxis(apart, 0, d + 2)
    apart = jnp.reshape(apart, span.split(shape, split.piece * split.full))
    if rest is not None:
        last = jnp.reshape(rest, span.split(shape, split.rest))
        apart = lax.concatenate([apart, last], d + 1)
    return _merged(apart, d)


def positions(size: int, span: AxisSpan, piece: Piece, dtype: Any) -> Any:
    """Return the positions of a micro-batch's elements along a dim of the full array.

    Args:
      size: size of the dim.
      span: where the dim holds the batch.
      piece: the micro-batch.
      dtype: integer dtype of the result.
    Returns:
      Array of shape [size of the dim in the micro-batch].
    """
    shape = (span.outer, piece.rows, span.inner)
    along = [lax.broadcasted_iota(dtype, shape, d) for d in range(3)]
    row = along[1] * jnp.asarray(piece.stride, dtype) + lax.convert_element_type(
        piece.start, dtype
    )
    major = jnp.asarray(size // span.outer, dtype)
    at = along[0] * major + row * jnp.asarray(span.inner, dtype) + along[2]
    return jnp.reshape(at, -1)


def sum_dtype(crossing: LoopCrossing, dtype: Any) -> Any:
    """Return the dtype in which an output is accumulated: float32 for sums of narrower
    floats.

    Args:
      crossing: the output.
      dtype: its dtype.
    """
    is_float = crossing.is_added and jnp.issubdtype(dtype, jnp.floating)
    return jnp.dtype("float32") if is_float and dtype.itemsize < 4 else dtype


def start(crossing: LoopCrossing, shape: Sequence[int], dtype: Any) -> Any:
    """Return the initial value of an accumulated output, given the output's shape and
    dtype."""
    how, dtype = (
        "sum" if crossing.is_added else crossing.how,
        sum_dtype(crossing, dtype),
    )
    return lax.full(shape, identity(how, dtype) if how in COMBINE else 0, dtype)


def combined(how: str, so_far: Any, part: Any) -> Any:
    """Return an accumulated output after one more micro-batch.

    Args:
      how: see `LoopCrossing`.
      so_far: accumulated output of the micro-batches before.
      part: output of this micro-batch.
    """
    part = lax.convert_element_type(part, so_far.dtype)
    return part if how == "unchanged" else COMBINE[how](so_far, part)


Views = Mapping[tuple[int, AxisSpan], Any]
"""(value id, the dim that holds the batch) → `pieces.view` of the array."""


@dataclass(eq=False)
class PieceEmitter:
    """Emitter of ops on one micro-batch, inside a loop.

    Attributes:
      found: the analysis.
      piece: the rows of the micro-batch.
      outer: value id → array of the whole batch, outside of the loop.
      views: of the arrays that the loop slices.
      env: value id → array of the micro-batch, or array equal in all micro-batches.
    """

    found: FlowResult
    piece: Piece
    outer: Callable[[int], Any]
    views: Views
    env: dict[int, Any] = field(default_factory=dict)
    _recomputed: dict[Any, Any] = field(default_factory=dict)

    def top(self, loop: MicrobatchLoop) -> list[Any]:
        """Run the ops of a loop on the micro-batch; return the values that leave it."""
        wanted, top = set(loop.ops), self.found.flat.top
        ops = tuple(item for item in top.ops if item.op.id in wanted)
        run_region(replace(top, inputs=(), ops=ops), (), self.env, self.item)
        return [self.leaving(c) for c in loop.leaving]

    def leaving(self, crossing: LoopCrossing) -> Any:
        """Return the array of a leaving value, weighted by its rows for a mean."""
        x = self.env[crossing.value]
        return _scaled(x, self.piece.share) if crossing.how == "mean" else x

    def block(self, block: FlatRegion, arrays: Sequence[Any]) -> list[Any]:
        """Run a region and return its outputs."""
        # Arrays of a region must not leak out of its trace.
        around, self._recomputed = self._recomputed, {}
        run_region(block, arrays, self.env, self.item)
        self._recomputed = around
        return [self.asis(v) for v in block.outputs]

    def asis(self, value: int) -> Any:
        """Return a value as the loop has it."""
        return self.env[value] if value in self.env else self.outer(value)

    def full(self, value: int, own: bool = False) -> Any:
        """Return a value in full.

        Args:
          value: id of the value.
          own: whether a partial sum is to be replaced by the micro-batch's own estimate
            of it, scaled to the whole batch; else the sum comes from an earlier loop.
        """
        state = self.found.states[value]
        if isinstance(state, WholeState):
            return self.asis(value)
        if own and isinstance(state, Partial):
            return _scaled(self.env[value], 1 / self.piece.share)
        return self.outer(value)

    def item(self, item: FlatOp) -> list[Any]:
        """Run an op of the micro-batch and return its results."""
        ran = self.found.ran[item.op.id]
        pairs = zip(item.operands, ran.uses, strict=True)
        arrays = [self.read(v, use) for v, use in pairs]
        if item.regions:
            return self.region(item, arrays, ran)
        made = zip(item.results, ran.results, strict=True)
        return self.bound(item, arrays, [self.shape(v, s) for v, s in made])

    def region(self, item: FlatOp, arrays: Sequence[Any], ran: Ran) -> list[Any]:
        """Run an op with regions, unchanged where no operand depends on the batch."""
        has_all = self.piece.rows == self.piece.split.rows
        if has_all or all(isinstance(u, WholeState) for u in ran.uses):
            return bind_eqn(item.eqn, arrays, item.eqn.params)
        if item.is_scan:
            rows = item.call.sliced(ran.uses)
            if any(isinstance(use, RowsState) and use.span.dim == 0 for use in rows):
                length = item.call.sliced(arrays)[0].shape[0]
                return bind_eqn(item.eqn, arrays, {**item.eqn.params, "length": length})

        def run(block: FlatRegion, inputs: Sequence[Any]) -> list[Any]:
            """Run a region; its outputs, but a condition, are as those of the op."""
            results = self.block(block, inputs)
            if item.call.kind is RegionKind.WHILE and block is item.regions[0]:
                return results
            states = [self.found.states[v] for v in block.outputs]
            return [*map(self.coerced, results, states, ran.results)]

        return run_regions(item, arrays, run)

    def bound(
        self, item: FlatOp, arrays: Sequence[Any], shapes: Sequence[tuple[int, ...]]
    ) -> list[Any]:
        """Bind an op without regions on the micro-batch.

        Args:
          item: the op.
          arrays: its operands.
          shapes: expected shapes of its results.
        Raises:
          MicrobatchError: the results have other shapes.
        """
        blocks = self._blocks(item)
        if blocks is None:
            results = bind_local(item.eqn, arrays, shapes)
        else:
            results = bind_eqn(item.eqn, arrays, blocks)
        got = [tuple(x.shape) for x in results]
        if got != list(shapes):
            raise MicrobatchError(
                f"`{item.op.name}` does not run on a part of the batch.",
                where=str(item.op.source),
                numbers=f"a piece of its results has shapes {got}, not {shapes}",
                fix="plan with `microbatches=1`, and report this.",
            )
        return results

    def _blocks(self, item: FlatOp) -> Mapping[str, Any] | None:
        """Return the parameters of an op that moves whole batches; None for others."""
        ran = self.found.ran.get(item.op.id)
        use = ran.uses[0] if ran is not None and ran.uses else None
        if not isinstance(use, RowsState):
            return None
        span, rows = use.span, self.piece.rows
        block = span.size * span.inner
        params = item.eqn.params
        return of_blocks(item.op.name, params, span.dim, block, rows * span.inner)

    def shape(self, value: int, state: State) -> tuple[int, ...]:
        """Return the shape of a value on the micro-batch, given its state."""
        shape = self.found.flat.program.values[value].shape
        if isinstance(state, RowsState):
            return state.span.resized(shape, self.piece.rows)
        return shape

    def read(self, value: int, use: State) -> Any:
        """Return a value in the state in which an op reads it."""
        state = self.found.states[value]
        if isinstance(use, RowsState):
            is_same = isinstance(state, RowsState) and is_there(state, use)
            if is_same and value in self.env:
                return self.env[value]
            return self.sliced(value, use)
        if isinstance(state, WholeState):
            return self.coerced(self.asis(value), state, use)
        if isinstance(use, Partial):
            return self.asis(value)
        return self.full(value, own=use.is_own)

    def coerced(self, x: Any, state: State, use: State) -> Any:
        """Convert an array of the micro-batch from one state to another."""
        if not isinstance(state, WholeState):
            return x
        if isinstance(use, RowsState):
            return self.piece.of(x, use.span)
        if not isinstance(use, Partial):
            return x
        if state.is_own:
            return _scaled(x, self.piece.share)
        if state.is_zero:
            return x
        x = jnp.asarray(x, x.dtype)  # x may be a literal
        none = lax.full_like(x, identity(use.reducer, x.dtype))
        return lax.select(jnp.broadcast_to(self.piece.is_first, x.shape), x, none)

    def sliced(self, value: int, rows: RowsState) -> Any:
        """Return the micro-batch's rows of a complete value, cached."""
        key = value, rows.span, rows.is_own, rows.at is not None
        if key not in self._recomputed:
            self._recomputed[key] = self._sliced(value, rows)
        return self._recomputed[key]

    def _sliced(self, value: int, rows: RowsState) -> Any:
        span = rows.span
        if rows.at is not None:  # positions count from the micro-batch's first row
            dtype = self.found.flat.program.values[value].dtype
            return lax.iota(dtype, self.piece.rows * span.inner)
        if (value, span) in self.views:
            return self.piece.take(self.views[value, span], span)
        if self.found.leaves_of(value, span) is not None:
            return self.remat(value, rows)
        return self.piece.of(self.full(value, rows.is_own), span)

    def remat(self, value: int, rows: RowsState) -> Any:
        """Compute the micro-batch's rows of a generated value; see `flow.evaluated`."""
        item = self.found.flat.maker[value]
        shape = self.shape(value, rows)
        with item.context():
            if (part := part_of(item.eqn)) is not None:
                whole = item.eqn.outvars[0].aval.shape

                def along(dim: int, dtype: Any) -> Any:
                    if dim != rows.span.dim:
                        return None
                    return positions(whole[dim], rows.span, self.piece, dtype)

                return part([self.full(v) for v in item.operands], shape, along)
            spot = spot_of(item, value, rows.span)
            assert spot is not None
            arrays = [
                self.full(v, rows.is_own)
                if cut is None
                else self.sliced(v, RowsState(cut, is_own=rows.is_own))
                for v, cut in operands_cut(item, spot)
            ]
            (result,) = self.bound(item, arrays, [shape])
            return result


def _scaled(x: Any, by: float) -> Any:
    return lax.mul(x, lax.full_like(x, by))
