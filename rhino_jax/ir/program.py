"""Program: the planner's representation of a computation.

A program is in SSA form. Every value has an id that indexes `Program.values`; every op
has an id that indexes `Program.ops`, numbered in the order of a depth-first walk into
regions. The same walk over the source program therefore gives the same ids, which is
how a plan is applied.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rhino_jax.ir.op import (
    PIN as PIN,
    USERS_CONSTRAINT as USERS_CONSTRAINT,
    AxisNames as AxisNames,
    Input as Input,
    Manual as Manual,
    ManualCollective as ManualCollective,
    NamedMesh as NamedMesh,
    Op as Op,
    Output as Output,
    Pin as Pin,
    Region as Region,
    RegionCall as RegionCall,
    RegionKind as RegionKind,
    Source as Source,
    Value as Value,
    item_bytes as item_bytes,
)
from rhino_jax.ir.printer import format_program
from rhino_jax.ir.transform import Transform


WhileTrips = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Program:
    """A whole computation. `str(program)` is its stable text form.

    Attributes:
      name: the function's name.
      values: all values, by id.
      ops: all ops, by id, those inside regions too.
      inputs: arguments and constants, in calling order.
      outputs: results.
      body: the top region.
      transforms: the passes that turned the user's program into this one, in order.
      while_trips: (place, trip count) that the user stated for `while` loops whose end
        depends on data; see `rhino_jax.ir.places.at_place`.
    """

    name: str
    values: tuple[Value, ...]
    ops: tuple[Op, ...]
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    body: Region
    transforms: tuple[Transform, ...] = ()
    while_trips: WhileTrips = ()

    def __str__(self) -> str:
        return format_program(
            self.name, self.values, self.ops, self.inputs, self.outputs, self.body
        )

    def is_on_host(self, end: Input | Output) -> bool:
        """Whether an input or output is in the memory of the host."""
        return self.values[end.value].on_host

    def walk(self) -> Iterator[tuple[Op, int]]:
        """Yield all ops in order, entering regions depth first, with their run counts.

        The run count is the product of the trip counts around the op.
        """
        yield from self._walk(self.body, 1)

    def _walk(self, region: Region, count: int) -> Iterator[tuple[Op, int]]:
        for op_id in region.ops:
            op = self.ops[op_id]
            yield op, count
            if op.call is not None:
                for inner in op.call.regions:
                    yield from self._walk(inner, count * op.call.trip_count)

    def within(self, op: Op) -> Iterator[tuple[Op, int]]:
        """Yield an op and all ops of its regions, with their run counts in one run."""
        yield from self._walk(Region(inputs=(), ops=(op.id,), outputs=()), 1)

    def flops_of(self, op: Op | None = None) -> float:
        """Return the FLOPs of an op, or of a run of the program, including regions over
        all their trips."""
        walk = self.walk() if op is None else self.within(op)
        return sum(inner.flops * count for inner, count in walk)

    def holds_backward(self, op: Op) -> bool:
        """Whether a forward op contains a backward pass, as a loop that computes
        gradients of its own in every trip."""
        if op.source.is_backward or op.call is None:
            return False
        ops = (inner for inner, _ in self.within(op))
        return any(inner.flops and inner.source.is_backward for inner in ops)
