"""Axes across ops: which part of which dim is the batch, the sequence, or the layers.

An axis is one index range. A dim that holds it is the product (outer, size, inner),
major first: of an axis of B indices, dim 0 of `[B, S]` is (1, B, 1), the merged dim of
`[B·S]` is (1, B, S). Reshapes split and merge dims; an op carries an axis from one
operand or result to another by the factor that holds it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rhino_jax.ir.factor import Layout, Rule


@dataclass(frozen=True, slots=True, order=True)
class AxisSpan:
    """The dim of a value that holds an axis, as (outer, size, inner), major first.

    Attributes:
      dim: position of the dim.
      size: number of indices of the axis that it holds.
      outer, inner: sizes of its major and minor factors next to the axis.
      first: the first index that it holds; not 0 for a slice of the axis.
    """

    dim: int
    size: int
    outer: int = 1
    inner: int = 1
    first: int = 0

    @property
    def is_plain(self) -> bool:
        """Whether the dim is the axis and nothing else."""
        return self.outer == self.inner == 1

    def moved(self, by: int) -> AxisSpan:
        """Return the span of a value with `by` more dims before this one."""
        return replace(self, dim=self.dim + by)

    def resized(self, shape: Sequence[int], size: int) -> tuple[int, ...]:
        """Return a shape with another number of indices of the axis in this dim."""
        whole = self.outer * size * self.inner
        return (*shape[: self.dim], whole, *shape[self.dim + 1 :])

    def within(self, start: int, stop: int) -> tuple[int, int]:
        """Return which of the indices held are `start` to `stop` of the axis."""
        low, high = start - self.first, stop - self.first
        return min(max(low, 0), self.size), min(max(high, 0), self.size)


@dataclass(frozen=True, slots=True, order=True)
class FactorSpan:
    """An axis inside a factor of an op; sizes are as those of an `AxisSpan`.

    Attributes:
      factor: position of the factor in the rule.
    """

    factor: int
    size: int
    outer: int = 1
    inner: int = 1
    first: int = 0


def locate(rule: Rule, layout: Layout, span: AxisSpan) -> FactorSpan | None:
    """Return where an op has the axis of an operand or result.

    Args:
      rule: factors of the op.
      layout: factors of each dim of the operand or result.
      span: the dim that holds the axis.
    Returns:
      None where no single factor holds the axis.
    """
    sizes = [rule.factors[f].size for f in layout[span.dim]]
    major, total = 1, math.prod(sizes)
    for f, size in zip(layout[span.dim], sizes, strict=True):
        minor = total // (major * size)
        if not span.outer % major and not span.inner % minor:
            outer, inner = span.outer // major, span.inner // minor
            if outer * span.size * inner == size:
                return FactorSpan(f, span.size, outer, inner, span.first)
        major *= size
    return None


def place(rule: Rule, layout: Layout, at: FactorSpan) -> AxisSpan | None:
    """Return the dim of an operand or result that holds an axis of the op.

    Args:
      rule: factors of the op.
      layout: factors of each dim of the operand or result.
      at: the axis, inside a factor.
    Returns:
      The first such dim; None where none has the factor.
    """
    for d, dim in enumerate(layout):
        if at.factor in dim:
            k = dim.index(at.factor)
            major = math.prod(rule.factors[f].size for f in dim[:k])
            minor = math.prod(rule.factors[f].size for f in dim[k + 1 :])
            return AxisSpan(d, at.size, major * at.outer, at.inner * minor, at.first)
    return None


def follow(rule: Rule, layout: Layout, span: AxisSpan, to: Layout) -> AxisSpan | None:
    """Return the dim of one operand or result that holds the axis of another.

    Args:
      rule: factors of the op.
      layout: factors of each dim of the operand or result with the axis.
      span: the dim that holds it.
      to: factors of each dim of the other operand or result.
    Returns:
      None where no single factor holds the axis, or the other one lacks that factor.
    """
    at = locate(rule, layout, span)
    return None if at is None else place(rule, to, at)
