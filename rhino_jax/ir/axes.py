"""Axes across ops: which part of which dim is the batch, the sequence, or the layers.
Values that enter and leave the regions of an op are paired with those outside.

An axis is one index range. A dim that holds it is the product (outer, size, inner),
major first: of an axis of B indices, dim 0 of `[B, S]` is (1, B, 1), the merged dim of
`[B·S]` is (1, B, S). Reshapes split and merge dims; an op carries an axis from one
operand or result to another by the factor that holds it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from rhino_jax.ir.factor import Layout, Rule
from rhino_jax.ir.program import Op, Program, RegionKind


@dataclass(frozen=True, slots=True)
class Crossing:
    """Values outside and inside of an op's regions that hold the same data.

    A carry of a loop is one crossing: an operand, a result, and the body's input and
    output.

    Attributes:
      operands, results: positions among those of the op.
      entering, leaving: ids of inputs and outputs of regions.
      is_stack: whether values inside are slices of those outside.
    """

    operands: tuple[int, ...] = ()
    results: tuple[int, ...] = ()
    entering: tuple[int, ...] = ()
    leaving: tuple[int, ...] = ()
    is_stack: bool = False


def crossings(op: Op) -> Iterator[Crossing]:
    """Yield the values that enter and leave the regions of an op."""
    call = op.call
    assert call is not None
    if call.kind is RegionKind.SCAN:
        yield from _of_scan(op)
        return
    if call.kind is RegionKind.WHILE:
        yield from _of_while(op)
        return
    first = call.kind is RegionKind.COND  # its first operand chooses the region
    for i in range(first, len(op.operands)):
        entering = tuple(region.inputs[i - first] for region in call.regions)
        yield Crossing(operands=(i,), entering=entering)
    for i in range(len(op.results)):
        leaving = tuple(region.outputs[i] for region in call.regions)
        yield Crossing(results=(i,), leaving=leaving)


def _of_scan(op: Op) -> Iterator[Crossing]:
    assert op.call is not None
    (region,) = op.call.regions
    first, last = op.call.num_consts, op.call.first_slice
    for i, v in enumerate(region.inputs):
        if first <= i < last:
            k = i - first
            yield Crossing((i,), (k,), (v,), (region.outputs[k],))
        else:
            yield Crossing(operands=(i,), entering=(v,), is_stack=i >= last)
    for k in range(op.call.num_carry, len(op.results)):
        yield Crossing(results=(k,), leaving=(region.outputs[k],), is_stack=True)


def _of_while(op: Op) -> Iterator[Crossing]:
    assert op.call is not None
    cond, body = op.call.regions
    of_cond, of_body = op.call.num_cond_consts, op.call.num_consts
    for i in range(of_cond):
        yield Crossing(operands=(i,), entering=(cond.inputs[i],))
    for i in range(of_body):
        yield Crossing(operands=(of_cond + i,), entering=(body.inputs[i],))
    for k in range(op.call.num_carry):
        entering = cond.inputs[of_cond + k], body.inputs[of_body + k]
        yield Crossing((of_cond + of_body + k,), (k,), entering, (body.outputs[k],))


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

    def split(self, shape: Sequence[int], *sizes: int) -> tuple[int, ...]:
        """Return a shape with this dim split into outer, the axis, and inner.

        Args:
          shape: shape of the value.
          sizes: size of the axis, or those of factors that it is split into, major
            first.
        """
        split = self.outer, *sizes, self.inner
        return (*shape[: self.dim], *split, *shape[self.dim + 1 :])

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
    for span in _with_factor(rule, layout, at.factor):
        outer, inner = span.outer * at.outer, at.inner * span.inner
        return AxisSpan(span.dim, at.size, outer, inner, at.first)
    return None


def _with_factor(rule: Rule, layout: Layout, factor: int) -> Iterator[AxisSpan]:
    """Yield the dims of an operand or result that have a factor, with its size."""
    for d, dim in enumerate(layout):
        if factor in dim:
            sizes = [rule.factors[f].size for f in dim]
            k = dim.index(factor)
            inner = math.prod(sizes[k + 1 :])
            yield AxisSpan(d, sizes[k], math.prod(sizes[:k]), inner)


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


class AxisEnd(NamedTuple):
    """A dim that holds an axis of an op.

    Attributes:
      value: id of the value.
      span: the dim.
      operand, result: position of the value among the op's operands or results; None
        where it is no such, as inputs and outputs of the op's regions are not.
    """

    value: int
    span: AxisSpan
    operand: int | None = None
    result: int | None = None


def ends_of(op: Op, factor: int) -> list[AxisEnd]:
    """Return the dims of an op's operands and results that have one of its factors."""
    rule, found = op.rule, list[AxisEnd]()
    assert rule is not None
    for i, layout in enumerate(rule.operands):
        spans = _with_factor(rule, layout, factor)
        found += (AxisEnd(op.operands[i], span, operand=i) for span in spans)
    for i, layout in enumerate(rule.results):
        spans = _with_factor(rule, layout, factor)
        found += (AxisEnd(op.results[i], span, result=i) for span in spans)
    return found


def ends_across(program: Program, op: Op) -> Iterator[list[AxisEnd]]:
    """Yield, for every dim of values that enter or leave an op's regions, the dims that
    are the same one outside and inside.

    A value is the same inside and outside, or one is the slices of the other.
    """
    for at in crossings(op):
        inside = at.entering + at.leaving
        for d, size in enumerate(program.values[inside[0]].shape):
            span = AxisSpan(d, size)
            around = span.moved(at.is_stack)
            yield [
                *(AxisEnd(op.operands[i], around, operand=i) for i in at.operands),
                *(AxisEnd(op.results[i], around, result=i) for i in at.results),
                *(AxisEnd(value, span) for value in inside),
            ]
