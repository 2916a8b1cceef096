"""Slices of arrays along the sequence: taking them, and joining them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax import lax

from rhino_jax._compat import hide_frames
from rhino_jax.ir.axes import AxisSpan


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

    def rows(self, span: AxisSpan, t: int) -> tuple[int, int]:
        """Return the range of slice t, within the tokens that a value holds."""
        return span.within(self.bounds[t], self.bounds[t + 1])

    def columns(self, span: AxisSpan, t: int) -> tuple[int, int]:
        """Return the range up to the end of slice t, within the tokens of a value."""
        return span.within(0, self.bounds[t + 1])


def taken(x: Any, span: AxisSpan, start: int, stop: int) -> Any:
    """Return tokens `start` to `stop` of those that an array holds.

    Args:
      x: the array.
      span: its sequence dim.
      start, stop: counted from the first token that it holds.
    """
    d, count = span.dim, x.shape[span.dim] // (span.outer * span.inner)
    if (start, stop) == (0, count):
        return x
    if span.outer == 1:
        return lax.slice_in_dim(x, start * span.inner, stop * span.inner, axis=d)
    part = lax.slice_in_dim(_opened(x, span), start, stop, axis=d + 1)
    return lax.reshape(part, span.resized(x.shape, stop - start))


def joined(parts: Sequence[Any], span: AxisSpan) -> Any:
    """Concatenate slices of an array along the tokens.

    Args:
      parts: the slices, in order.
      span: their sequence dim.
    """
    parts = [p for p in parts if p.shape[span.dim]] or list(parts[:1])
    if len(parts) == 1:
        return parts[0]
    if span.outer == 1:
        return lax.concatenate(parts, span.dim)
    whole = lax.concatenate([_opened(p, span) for p in parts], span.dim + 1)
    count = whole.shape[span.dim + 1]
    return lax.reshape(whole, span.resized(parts[0].shape, count))


def padded(x: Any, span: AxisSpan, low: int, high: int) -> Any:
    """Pad an array with zeros before and after its tokens.

    Args:
      x: the array.
      span: its sequence dim.
      low, high: number of tokens before and after.
    """
    if not low and not high:
        return x
    zero = lax.full((), 0, x.dtype)
    opened = x if span.is_plain else _opened(x, span)
    d = span.dim if span.is_plain else span.dim + 1
    config = [(low, high, 0) if k == d else (0, 0, 0) for k in range(opened.ndim)]
    made = lax.pad(opened, zero, config)
    return lax.reshape(made, span.resized(x.shape, made.shape[d]))


def _opened(x: Any, span: AxisSpan) -> Any:
    """Reshape an array to [.., outer, tokens, inner, ..]."""
    d = span.dim
    count = x.shape[d] // (span.outer * span.inner)
    shape = (*x.shape[:d], span.outer, count, span.inner, *x.shape[d + 1 :])
    return lax.reshape(x, shape)
