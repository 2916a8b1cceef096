"""Ops that commute with sums, values that can stay unreduced, and how ops read them.

Ops are linear up to rounding, as for any other order of addition.
Regions that run once (`jit`, recomputed regions) and scans are analysed; loops of
unknown trip count and conditionals are not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from rhino_jax.frontend.regions import PLAIN_CALLS, REMATS
from rhino_jax.ir.program import Op, Program, Region, RegionKind
from rhino_jax.ir.traits import FROM_ALL, OpKind


Ways = tuple[tuple[int, ...], ...]
"""Sets of positions of operands; all operands of one set may be unreduced."""

_FLOATS = ("float", "bfloat", "complex")


def linear_ways(program: Program, op: Op) -> Ways:
    """Return the sets of operands in which an op is jointly linear, if any.

    Convolutions and grouped matmuls are left out: over one more batch dim, they are
    other ops.
    """
    traits, values = op.traits, program.values
    if op.call is not None or len(op.results) != 1 or traits.states_placement:
        return ()
    if traits.kind is OpKind.CONVOLUTION or traits.masked:
        return ()
    if not values[op.results[0]].dtype.startswith(_FLOATS):
        return ()
    return tuple(
        group
        for group in traits.commutes_in(len(op.operands))
        if all(values[op.operands[i]].dtype.startswith(_FLOATS) for i in group)
    )


def needs_all(op: Op) -> bool:
    """Whether reduced operands would have to be padded with zeros if others are
    unreduced."""
    return op.traits.kind is OpKind.MOVEMENT and op.traits.moves == FROM_ALL


def sums(op: Op) -> bool:
    """Whether an op's own sums can be deferred."""
    if op.traits.kind in (OpKind.REDUCTION, OpKind.SCATTER):
        return op.traits.reducer == "sum"
    return op.traits.is_contraction and not op.traits.masked


@dataclass(slots=True)
class Reach:
    """Values that can be unreduced.

    Attributes:
      values: value id → number of times that it is computed per step.
      passed: (value id, id of the value that is unreduced if the first is read so, op
        that computes the second, or None where it is the first in another region).
      together: (value id, value id): the first must be unreduced if the second is.
      ended: ids of values that some op reads reduced.
    """

    values: dict[int, int] = field(default_factory=dict)
    passed: list[tuple[int, int, Op | None]] = field(default_factory=list)
    together: list[tuple[int, int]] = field(default_factory=list)
    ended: set[int] = field(default_factory=set)


def visible(program: Program) -> dict[int, int]:
    """Return ids of analysed ops → number of times that each runs per step."""
    return {op.id: count for op, count in _walk(program, program.body, 1)}


def _walk(program: Program, region: Region, count: int) -> Iterator[tuple[Op, int]]:
    for op_id in region.ops:
        op = program.ops[op_id]
        yield op, count
        if op.call is not None and is_entered(op):
            for inner in op.call.regions:
                yield from _walk(program, inner, count * op.call.trip_count)


def is_entered(op: Op) -> bool:
    """Whether values may be unreduced inside of an op with regions."""
    assert op.call is not None
    return (
        op.name in PLAIN_CALLS or op.name in REMATS or op.call.kind is RegionKind.SCAN
    )


def reach(program: Program, sources: Iterable[int], runs: Mapping[int, int]) -> Reach:
    """Return the values that linear ops compute from the unreduced results of some ops.

    Args:
      program: the program.
      sources: ids of the ops whose sums are deferred.
      runs: result of `visible`.
    """
    made = set(sources)
    found = Reach()
    found.values = {program.ops[s].results[0]: runs[s] for s in made}
    ops = [(program.ops[op], count) for op, count in runs.items()]
    while True:
        before = len(found.values)
        for op, count in ops:
            if op.id not in made:
                _grow(program, op, count, found.values)
        if len(found.values) == before:
            break
    for op, _ in ops:
        _read(program, op, found, is_source=op.id in made)
    found.ended |= found.values.keys() & set(program.body.outputs)
    return found


def _grow(program: Program, op: Op, count: int, values: dict[int, int]) -> None:
    """Add an op's results, and values in its regions, that can be unreduced.

    Args:
      program: the program.
      op: the op.
      count: number of times that it runs per step.
      values: values that can be unreduced; extended by this.
    """
    if op.call is None:
        if values.keys().isdisjoint(op.operands):
            return
        if op.results and way_of(program, op, values):
            values[op.results[0]] = count
        return
    if not is_entered(op):
        return
    times = count * op.call.trip_count
    for outer, inner, is_in in crossings(op):
        source, target = (outer, inner) if is_in else (inner, outer)
        if source in values:
            values.setdefault(target, times if is_in else count)
    for inner, out, result in carried(op):
        if out in values or result in values or inner in values:
            values.setdefault(inner, times)
            values.setdefault(result, count)


def crossings(op: Op) -> Iterator[tuple[int, int, bool]]:
    """Yield values that enter or leave an op's regions and can be unreduced.

    Carries that leave a loop are not among them: see `carried`.

    Yields:
      (value outside, value inside, whether it enters the region).
    """
    call = op.call
    assert call is not None
    (region,) = call.regions
    if call.kind is RegionKind.SCAN:
        pairs = zip(call.carries(op.operands), call.carries(region.inputs), strict=True)
        for outer, inner in pairs:
            yield outer, inner, True
        pairs = zip(call.stacked(op.results), call.stacked(region.outputs), strict=True)
        for outer, inner in pairs:
            yield outer, inner, False
        return
    if op.name in PLAIN_CALLS:
        for outer, inner in zip(op.operands, region.inputs, strict=True):
            yield outer, inner, True
    for result, out in zip(op.results, region.outputs, strict=True):
        yield result, out, False


def carried(op: Op) -> Iterator[tuple[int, int, int]]:
    """Yield a scan's carries as (body's input, body's output, result of the scan)."""
    call = op.call
    assert call is not None
    if call.kind is RegionKind.SCAN:
        (region,) = call.regions
        entering = call.carries(region.inputs)
        yield from zip(entering, region.outputs, op.results, strict=False)


def way_of(program: Program, op: Op, values: Mapping[int, int]) -> tuple[int, ...]:
    """Return the operands in which an op is linear, if enough of them can be unreduced.

    Returns:
      Positions of the operands; empty where there are none.
    """
    for way in linear_ways(program, op):
        could = [op.operands[i] in values for i in way]
        if all(could) if needs_all(op) else any(could):
            return way
    return ()


def _read(program: Program, op: Op, found: Reach, *, is_source: bool) -> None:
    """Record how an op reads values that can be unreduced.

    Args:
      program: the program.
      op: the op.
      found: values that can be unreduced; extended by this.
      is_source: whether the op's own sum is deferred, so that it reads reduced
        operands.
    """
    open_ends: set[int] = set()
    if found.values.keys().isdisjoint(op.operands) and op.call is None:
        return
    if op.call is None:
        way = () if is_source else way_of(program, op, found.values)
        for i in way:
            if op.operands[i] in found.values:
                found.passed.append((op.operands[i], op.results[0], op))
                if needs_all(op):
                    found.together.append((op.operands[i], op.results[0]))
        open_ends = {i for i in range(len(op.operands)) if i not in way}
    elif not is_entered(op):
        open_ends = set(range(len(op.operands)))
    else:
        goes_in: set[int] = set()
        for outer, inner, is_in in crossings(op):
            source, target = (outer, inner) if is_in else (inner, outer)
            if source in found.values:
                found.passed.append((source, target, None))
            if is_in:
                goes_in.add(outer)
        for inner, out, result in carried(op):
            if inner in found.values:
                found.together += [(inner, result), (result, inner)]
                if out in found.values:
                    found.passed.append((out, result, None))
        open_ends = {i for i, v in enumerate(op.operands) if v not in goes_in}
    found.ended |= {op.operands[i] for i in open_ends} & found.values.keys()
