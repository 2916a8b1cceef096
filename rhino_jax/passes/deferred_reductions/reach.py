"""Values that can stay unreduced: those that linear ops compute from unreduced ones.

Ops are linear up to rounding, as for any other order of addition. Recomputed regions
and scans are looked into; loops of unknown trip count and conditionals are not.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from rhino_jax.frontend.regions import PLAIN_CALLS, REMATS
from rhino_jax.ir.program import Op, Program
from rhino_jax.ir.traits import FROM_ALL, OpKind
from rhino_jax.rewrite.flat import FlatOp, FlatProgram, FlatRegion
from rhino_jax.rewrite.flatten import flatten


def inlined(program: Program, closed: object = None) -> FlatProgram:
    """Return the program as this pass looks at it: all plain calls are inlined."""
    return flatten(program, closed, lambda op: bool(op.call and op.name in PLAIN_CALLS))


def is_entered(item: FlatOp) -> bool:
    """Whether values may be unreduced inside of an op's regions."""
    return bool(item.regions) and (item.op.name in REMATS or item.is_scan)


def is_sum(op: Op) -> bool:
    """Whether an op's own sums can be deferred."""
    if op.traits.kind in (OpKind.REDUCTION, OpKind.SCATTER):
        return op.traits.reducer == "sum"
    return op.traits.is_contraction and not op.traits.masked


def linear_ways(program: Program, op: Op) -> tuple[tuple[int, ...], ...]:
    """Return the sets of operand positions in which an op is jointly linear, if any.

    Convolutions and grouped matmuls are left out: over one more batch dim, they are
    other ops.
    """
    traits = op.traits
    if op.call or len(op.results) != 1 or traits.states_placement or traits.masked:
        return ()

    def is_float(value: int) -> bool:
        return program.values[value].dtype.startswith(("float", "bfloat", "complex"))

    if traits.kind is OpKind.CONVOLUTION or not is_float(op.results[0]):
        return ()
    ways = traits.commutes_in(len(op.operands))
    return tuple(way for way in ways if all(is_float(op.operands[i]) for i in way))


def runs_of(flat: FlatProgram) -> dict[int, tuple[FlatOp, int]]:
    """Return op id → the op, and the number of times that it runs per step."""

    def walk(region: FlatRegion, count: int) -> Iterator[tuple[FlatOp, int]]:
        for item in region.ops:
            yield item, count
            if is_entered(item):
                yield from walk(item.regions[0], count * item.call.trip_count)

    return {item.op.id: (item, count) for item, count in walk(flat.top, 1)}


@dataclass
class Reach:
    """The values that can be unreduced if the sums of some ops are.

    Attributes:
      flat: the program.
      runs: its ops, as `runs_of` returns them.
      sources: ids of the ops that sum.
      values: value id → number of times that it is computed per step.
      passed: (value id, id of the value that is unreduced if the first is read so, op
        that computes the second, or None where it is the first in another region).
      together: (value id, value id): the first must be unreduced if the second is.
      ended: ids of values that some op reads reduced.
    """

    flat: FlatProgram
    runs: Mapping[int, tuple[FlatOp, int]]
    sources: Collection[int]
    values: dict[int, int] = field(default_factory=dict)
    passed: list[tuple[int, int, FlatOp | None]] = field(default_factory=list)
    together: list[tuple[int, int]] = field(default_factory=list)
    ended: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        """Propagate to a fixed point; its last round records how values are read."""
        before = -1
        while before < len(self.values):
            before = len(self.values)
            self.passed, self.together = [], []
            self.ended = self.values.keys() & self.flat.top.outputs
            for item, count in self.runs.values():
                if item.regions:
                    self._through_regions(item, count)
                else:
                    self._through(item, count)

    def _through(self, item: FlatOp, count: int) -> None:
        op, values = item.op, self.values
        is_source = op.id in self.sources
        if not is_source and values.keys().isdisjoint(item.operands):
            return
        # Reduced operands of such ops would have to be padded with zeros.
        needs_all = op.traits.kind is OpKind.MOVEMENT and op.traits.moves == FROM_ALL
        enough = all if needs_all else any
        ways = () if is_source else linear_ways(self.flat.program, op)
        found = (w for w in ways if enough(item.operands[i] in values for i in w))
        way = next(found, ())
        if way or is_source:
            values[item.results[0]] = count
        for i, v in enumerate(item.operands):
            if v not in values:
                continue
            if i not in way:
                self.ended.add(v)
                continue
            self.passed.append((v, item.results[0], item))
            if needs_all:
                self.together.append((v, item.results[0]))

    def _through_regions(self, item: FlatOp, count: int) -> None:
        values, entering = self.values, set[int]()
        if is_entered(item):
            call, (inside,) = item.call, item.regions
            times = count * call.trip_count
            links = [
                (out, result, count)
                for out, result in zip(inside.outputs, item.results, strict=True)
            ]
            if item.is_scan:
                entering = {*call.carries(item.operands)}
                into = call.carries(inside.inputs)
                pairs = zip(call.carries(item.operands), into, strict=True)
                links = [(a, b, times) for a, b in pairs] + [*call.stacked(links)]
            for a, b, runs in links:
                if a in values:
                    values.setdefault(b, runs)
                    self.passed.append((a, b, None))
            for inner, out, result in carried(item):
                if not values.keys().isdisjoint((inner, out, result)):
                    values.setdefault(inner, times)
                    values.setdefault(result, count)
                    self.together += [(inner, result), (result, inner)]
                    if out in values:
                        self.passed.append((out, result, None))
        self.ended |= values.keys() & (set(item.operands) - entering)


def carried(item: FlatOp) -> Iterator[tuple[int, int, int]]:
    """Yield a scan's carries as (body's input, body's output, result of the scan)."""
    if item.is_scan:
        (inside,) = item.regions
        entering = item.call.carries(inside.inputs)
        yield from zip(entering, inside.outputs, item.results, strict=False)
