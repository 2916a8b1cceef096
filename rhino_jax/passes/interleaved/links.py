"""Which dims of an op are one and the same index range, in whatever order it is.

Where every operand has the elements of such a range in another order, all the same one,
the op gives its results in that order too and does nothing else differently: a matmul
along its free and contracted dims, a sum, elementwise ops.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from rhino_jax.ir.factor import FactorKind, Rule
from rhino_jax.ir.program import Op, Program, RegionKind
from rhino_jax.ir.traits import OpKind


class DimRef(NamedTuple):
    """One dim of a value.

    Attributes:
      value: value id.
      dim: which of its dims.
    """

    value: int
    dim: int


@dataclass(frozen=True, slots=True)
class DimLink:
    """Dims that hold the same range.

    Attributes:
      places: the dims.
      minor: of each, how many of its elements lie together for one of the range.
      operands: (operand, dim) of the op among them.
      results: (result, dim) likewise.
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
"""Ops that know elements of a parallel dim by nothing but what they are. A generator
knows their positions, a kernel may, and a convolution has groups of them."""

_SUMS = frozenset({OpKind.CONTRACTION, OpKind.REDUCTION})


def links(program: Program, op: Op) -> list[DimLink]:
    """The ranges of an op that may come in any order."""
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
    """The dims that are made of a factor, if it is the major one of all of them."""
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
    """Values that enter and leave regions are the same inside and outside."""
    for operands, results, inside, is_stack in crossings(op):
        values = [op.operands[i] for i in operands] + [op.results[i] for i in results]
        rank = program.values[inside[0]].rank
        for d in range(rank):
            outer = d + is_stack
            places = [DimRef(v, outer) for v in values] + [DimRef(v, d) for v in inside]
            yield DimLink(
                tuple(places),
                (1,) * len(places),
                frozenset((i, outer) for i in operands),
                frozenset((i, outer) for i in results),
            )


Crossing = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], bool]
"""Operands, results, values inside of regions, and whether these are slices of those
outside."""


def crossings(op: Op) -> Iterator[Crossing]:
    """What enters and leaves the regions of an op."""
    call = op.call
    assert call is not None
    if call.kind is RegionKind.CALL:
        (region,) = call.regions
        for i, v in enumerate(region.inputs[: len(op.operands)]):
            yield (i,), (), (v,), False
        for i, v in enumerate(region.outputs):
            yield (), (i,), (v,), False
    elif call.kind is RegionKind.COND:
        for i in range(1, len(op.operands)):
            yield (i,), (), tuple(r.inputs[i - 1] for r in call.regions), False
        for i in range(len(op.results)):
            yield (), (i,), tuple(r.outputs[i] for r in call.regions), False
    elif call.kind is RegionKind.SCAN:
        yield from _of_scan(op)
    else:
        yield from _of_while(op)


def _of_scan(op: Op) -> Iterator[Crossing]:
    assert op.call is not None
    (region,) = op.call.regions
    first, last = op.call.num_consts, op.call.num_consts + op.call.num_carry
    for i in range(len(op.operands)):
        if first <= i < last:
            inside = region.inputs[i], region.outputs[i - first]
            yield (i,), (i - first,), inside, False
        else:
            yield (i,), (), (region.inputs[i],), i >= last
    for i in range(op.call.num_carry, len(op.results)):
        yield (), (i,), (region.outputs[i],), True


def _of_while(op: Op) -> Iterator[Crossing]:
    assert op.call is not None
    cond, body = op.call.regions
    of_cond, of_body = op.call.num_cond_consts, op.call.num_consts
    for i in range(of_cond):
        yield (i,), (), (cond.inputs[i],), False
    for i in range(of_body):
        yield (of_cond + i,), (), (body.inputs[i],), False
    for i in range(op.call.num_carry):
        inside = cond.inputs[of_cond + i], body.inputs[of_body + i], body.outputs[i]
        yield (of_cond + of_body + i,), (i,), inside, False
