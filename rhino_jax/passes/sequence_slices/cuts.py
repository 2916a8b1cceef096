"""Slices of arrays along the sequence: taking them, and joining them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax import lax

from rhino_jax._compat import hide_frames
from rhino_jax.passes.sequence_slices.states import SequenceDim


hide_frames(__file__)


@dataclass(frozen=True, slots=True)
class SliceBounds:
    """Boundaries of the slices of a sequence.

    Attributes:
      bounds: first token of every slice, then the number of tokens.
    """

    bounds: tuple[int, ...]

    @classmethod
    def of(cls, lengths: Sequence[int]) -> SliceBounds:
        bounds = [0]
        for length in lengths:
            bounds.append(bounds[-1] + length)
        return cls(tuple(bounds))

    @property
    def count(self) -> int:
        return len(self.bounds) - 1

    def order(self, is_backward: bool) -> range:
        """Return the order in which a pass runs the slices."""
        return range(self.count - 1, -1, -1) if is_backward else range(self.count)

    def rows(self, place: SequenceDim, t: int) -> tuple[int, int]:
        """Return the range of slice t, within the tokens that a value holds."""
        return place.within(self.bounds[t], self.bounds[t + 1])

    def columns(self, place: SequenceDim, t: int) -> tuple[int, int]:
        """Return the range up to the end of slice t, within the tokens of a value."""
        return place.within(0, self.bounds[t + 1])


def taken(x: Any, place: SequenceDim, start: int, stop: int) -> Any:
    """Return tokens `start` to `stop` of those that an array holds.

    Args:
      x: the array.
      place: its sequence dim.
      start, stop: counted from the first token that it holds.
    """
    d, count = place.dim, x.shape[place.dim] // (place.outer * place.inner)
    if (start, stop) == (0, count):
        return x
    if place.outer == 1:
        return lax.slice_in_dim(x, start * place.inner, stop * place.inner, axis=d)
    part = lax.slice_in_dim(_opened(x, place), start, stop, axis=d + 1)
    return lax.reshape(part, place.resized(x.shape, stop - start))


def joined(parts: Sequence[Any], place: SequenceDim) -> Any:
    """Concatenate slices of an array along the tokens.

    Args:
      parts: the slices, in order.
      place: their sequence dim.
    """
    parts = [p for p in parts if p.shape[place.dim]] or list(parts[:1])
    if len(parts) == 1:
        return parts[0]
    if place.outer == 1:
        return lax.concatenate(parts, place.dim)
    whole = lax.concatenate([_opened(p, place) for p in parts], place.dim + 1)
    count = whole.shape[place.dim + 1]
    return lax.reshape(whole, place.resized(parts[0].shape, count))


def padded(x: Any, place: SequenceDim, low: int, high: int) -> Any:
    """Pad an array with zeros before and after its tokens.

    Args:
      x: the array.
      place: its sequence dim.
      low, high: number of tokens before and after.
    """
    if not low and not high:
        return x
    zero = lax.full((), 0, x.dtype)
    opened = x if place.is_plain else _opened(x, place)
    d = place.dim if place.is_plain else place.dim + 1
    config = [(low, high, 0) if k == d else (0, 0, 0) for k in range(opened.ndim)]
    made = lax.pad(opened, zero, config)
    return lax.reshape(made, place.resized(x.shape, made.shape[d]))


def _opened(x: Any, place: SequenceDim) -> Any:
    """Reshape an array to [.., outer, tokens, inner, ..]."""
    d = place.dim
    count = x.shape[d] // (place.outer * place.inner)
    shape = (*x.shape[:d], place.outer, count, place.inner, *x.shape[d + 1 :])
    return lax.reshape(x, shape)
