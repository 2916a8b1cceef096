"""Dims of an op that are one index range, whose order the op does not depend on.

Where all operands have the elements of such a range in the same permuted order, the op
computes its results in that order and is otherwise unchanged: a matmul along its free
and contracted dims, a sum, elementwise ops.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from rhino_jax.ir.crossings import crossings
from rhino_jax.ir.factor import FactorKind, Rule
from rhino_jax.ir.program import Op, Program
from rhino_jax.ir.traits import OpKind


class DimRef(NamedTuple):
    """One dim of a value.

    Attributes:
      value: value id.
      dim: position of the dim.
    """

    value: int
    dim: int


@dataclass(frozen=True, slots=True)
class DimLink:
    """Dims that hold the same index range.

    Attributes:
      places: the dims.
      minor: for each dim, the number of its consecutive elements per index of the
        range.
      operands: (operand position, dim) of those dims that are the op's operands'.
      results: (result position, dim) of those that are its results'.
    """

    places: tuple[DimRef, ...]
    minor: tuple[int, ...]
    operands: frozenset[tuple[int, int]]
    results: frozenset[tuple[int, int]]


_FREE = frozenset(
    {
        OpKind.ELEMENTWISE,
        OpKind.EXPONENTIAL,
        OpKind.CONVERSION,
        OpKind.IDENTITY,
        OpKind.BROADCAST,
        OpKind.MOVEMENT,
        OpKind.CONTRACTION,
        OpKind.REDUCTION,
        OpKind.LOOKUP,
        OpKind.SCATTER,
        OpKind.UPDATE,
    }
)
"""Kinds of ops that depend only on the values of elements along a parallel dim.
Generators depend on their positions, kernels may, and convolutions group them."""

_SUMS = frozenset({OpKind.CONTRACTION, OpKind.REDUCTION})
"""Kinds of ops that sum over dims."""


def links(program: Program, op: Op) -> list[DimLink]:
    """Return the index ranges of an op whose order it does not depend on."""
    if op.call is not None:
        return list(_through(program, op))
    if op.rule is None or not op.is_known or op.manual is not None:
        return []
    if op.traits.kind not in _FREE:
        return []
    return [
        link
        for f in range(len(op.rule.factors))
        if (link := _of_factor(op, op.rule, f)) is not None
    ]


def _of_factor(op: Op, rule: Rule, factor: int) -> DimLink | None:
    """Return the dims with a factor of an op, if it is the major factor of all of them.

    Returns:
      None where it is not, or the op depends on the factor's order.
    """
    kind, reducer = rule.factors[factor].kind, rule.factors[factor].reducer
    is_summed = kind is FactorKind.REDUCE and op.traits.kind in _SUMS
    if not (kind is FactorKind.PARALLEL or (is_summed and reducer)):
        return None
    found: list[tuple[DimRef, int]] = []
    ends: list[set[tuple[int, int]]] = [set(), set()]
    sides = (rule.operands, op.operands), (rule.results, op.results)
    for end, (layouts, values) in zip(ends, sides, strict=True):
        for i, layout in enumerate(layouts):
            for d, dim in enumerate(layout):
                if factor not in dim:
                    continue
                if dim[0] != factor:
                    return None
                minor = 1
                for other in dim[1:]:
                    minor *= rule.factors[other].size
                found.append((DimRef(values[i], d), minor))
                end.add((i, d))
    if not ends[0] and op.traits.kind is not OpKind.BROADCAST:
        return None
    places, minors = zip(*found, strict=True) if found else ((), ())
    return DimLink(places, minors, frozenset(ends[0]), frozenset(ends[1]))


def _through(program: Program, op: Op) -> Iterator[DimLink]:
    """Yield links of the values that enter and leave an op's regions.

    A value is the same inside and outside, or one is the slices of the other.
    """
    for at in crossings(op):
        values = [op.operands[i] for i in at.operands]
        values += [op.results[i] for i in at.results]
        inside = at.entering + at.leaving
        rank = program.values[inside[0]].rank
        for d in range(rank):
            outer = d + at.is_stack
            places = [DimRef(v, outer) for v in values] + [DimRef(v, d) for v in inside]
            yield DimLink(
                tuple(places),
                (1,) * len(places),
                frozenset((i, outer) for i in at.operands),
                frozenset((i, outer) for i in at.results),
            )
