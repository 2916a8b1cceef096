"""Which rows a piece has, and arrays taken apart into pieces and put together.

Piece i of m equal ones has the rows i, i + m, i + 2m, …: where the batch is cut over
devices, each then has its share of every piece and nothing moves. (Of contiguous
pieces, all but a few devices would have none; XLA moves the whole batch for these.)
What is left over is one smaller piece of the last rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax

from rhino_jax._compat import hide_frames
from rhino_jax.passes.microbatch.flow.states import RowsState


hide_frames(__file__)


@dataclass(frozen=True, slots=True)
class Split:
    """A batch in pieces.

    Attributes:
      rows: of the batch.
      piece: of a piece.
      full: how many pieces of that size.
      rest: rows of a last, smaller piece.
    """

    rows: int
    piece: int
    full: int
    rest: int

    @classmethod
    def of(cls, rows: int, count: int) -> Split:
        piece = -(-rows // count)
        return cls(rows, piece, rows // piece, rows % piece)


@dataclass(frozen=True, slots=True)
class Piece:
    """The rows `start + stride · j`, j below `rows`.

    Attributes:
      split: of the batch.
      index: among those of full size, traced; None: the last, smaller one.
    """

    split: Split
    index: Any

    @property
    def rows(self) -> int:
        return self.split.rest if self.index is None else self.split.piece

    @property
    def stride(self) -> int:
        return 1 if self.index is None else self.split.full

    @property
    def start(self) -> Any:
        return self.split.rows - self.split.rest if self.index is None else self.index

    @property
    def share(self) -> float:
        """Of the rows of the batch."""
        return self.rows / self.split.rows

    @property
    def is_first(self) -> Any:
        """Whether it is the first of all."""
        if self.index is None:
            return jnp.full((), self.split.full == 0)
        return self.index == 0

    def of(self, x: Any, rows: RowsState) -> Any:
        """A piece of a whole array."""
        return self.take(view(x, rows, self.split), rows)

    def take(self, viewed: tuple[Any, Any], rows: RowsState) -> Any:
        """A piece of an array of which `view` was made."""
        full, rest = viewed
        if self.index is None:
            return rest
        at = lax.dynamic_index_in_dim(full, self.index, rows.dim + 2, keepdims=False)
        return _merged(at, rows.dim)


def view(x: Any, rows: RowsState, split: Split) -> tuple[Any, Any]:
    """An array as pieces are taken of it.

    Returns:
      [.., outer, rows of a piece, pieces, inner, ..], and the last piece, if any.
    """
    d, even = rows.dim, split.piece * split.full
    head, tail = x.shape[:d], x.shape[d + 1 :]
    apart = jnp.reshape(x, (*head, rows.outer, split.rows, rows.inner, *tail))
    rest = None
    if split.rest:
        rest = _merged(lax.slice_in_dim(apart, even, split.rows, axis=d + 1), d)
        apart = lax.slice_in_dim(apart, 0, even, axis=d + 1)
    shape = (*head, rows.outer, split.piece, split.full, rows.inner, *tail)
    return jnp.reshape(apart, shape), rest


def _merged(x: Any, dim: int) -> Any:
    """[.., outer, rows, inner, ..] with these three as one dim."""
    size = x.shape[dim] * x.shape[dim + 1] * x.shape[dim + 2]
    return jnp.reshape(x, (*x.shape[:dim], size, *x.shape[dim + 3 :]))


def together(stack: Any, rest: Any, rows: RowsState, split: Split) -> Any:
    """The whole array of pieces, stacked along a first dim, and of the last piece."""
    d = rows.dim
    head, tail = stack.shape[1 : d + 1], stack.shape[d + 2 :]
    shape = (split.full, *head, rows.outer, split.piece, rows.inner, *tail)
    apart = jnp.moveaxis(jnp.reshape(stack, shape), 0, d + 2)
    even = split.piece * split.full
    apart = jnp.reshape(apart, (*head, rows.outer, even, rows.inner, *tail))
    if rest is not None:
        last = jnp.reshape(rest, (*head, rows.outer, split.rest, rows.inner, *tail))
        apart = lax.concatenate([apart, last], d + 1)
    return _merged(apart, d)


def positions(size: int, rows: RowsState, piece: Piece, dtype: Any) -> Any:
    """Where the elements of a piece are along the dim of the whole: [local size]."""
    shape = (rows.outer, piece.rows, rows.inner)
    along = [lax.broadcasted_iota(dtype, shape, d) for d in range(3)]
    row = along[1] * jnp.asarray(piece.stride, dtype) + _as(piece.start, dtype)
    major = jnp.asarray(size // rows.outer, dtype)
    at = along[0] * major + row * jnp.asarray(rows.inner, dtype) + along[2]
    return jnp.reshape(at, -1)


def _as(x: Any, dtype: Any) -> Any:
    return lax.convert_element_type(x, dtype)
