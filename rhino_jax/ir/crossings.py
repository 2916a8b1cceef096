"""Values that enter and leave the regions of an op, paired with those outside."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rhino_jax.ir.op import Op, RegionKind


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
