"""Rows of each micro-batch: slice arrays into micro-batches and reassemble them; and
outputs of micro-batches, accumulated one after the other.

Micro-batch i of m equal ones has the rows i, i + m, i + 2m, …: where the batch is
sharded over devices, each then has its share of every micro-batch and no data moves.
(Of contiguous micro-batches, all but a few devices would have no rows; XLA moves the
whole batch for these.) Remaining rows form one smaller micro-batch of the last rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax

from rhino_jax.frontend.rules.reduce import COMBINE, identity
from rhino_jax.ir.axes import AxisSpan
from rhino_jax.passes.microbatch.cut import LoopCrossing


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


def sum_dtype(crossing: LoopCrossing, dtype: Any, accumulate: str = "float32") -> Any:
    """Return the dtype in which an output is accumulated.

    Args:
      crossing: the output.
      dtype: its dtype.
      accumulate: dtype of sums of narrower floats.
    """
    is_float = crossing.is_added and jnp.issubdtype(dtype, jnp.floating)
    return jnp.dtype(accumulate) if is_float and dtype.itemsize < 4 else dtype


def start(crossing: LoopCrossing, shape: Sequence[int], dtype: Any) -> Any:
    """Return the initial value of an accumulated output."""
    how = "sum" if crossing.is_added else crossing.how
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
