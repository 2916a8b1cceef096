"""Carries of the loop over micro-batches, and how they accumulate."""

from __future__ import annotations

from dataclasses import dataclass

from rhino_jax.passes.spmd_pipeline.along import passes_on
from rhino_jax.rewrite.flat import FlatRegion


@dataclass(frozen=True, slots=True)
class Sum:
    """An output that micro-batches accumulate, a carry of the loop over them.

    Attributes:
      part: value of one micro-batch that is accumulated; None: the carry is passed
        through.
      how: its reducer, as "sum"; "unchanged": all micro-batches output the same value.
      steps: positions of the ops that accumulate it.
    """

    part: int | None
    how: str
    steps: tuple[int, ...]


def sum_of(region: FlatRegion, carry: int, value: int) -> Sum:
    """Return how a carry accumulates.

    Args:
      region: ops of a micro-batch.
      carry: id of the carry, an input.
      value: id of the output that is the carry of the next micro-batch.
    """
    if value == carry or value in region.consts:
        return Sum(None, "unchanged", ())
    result, steps = _passed(region, value)
    if (at := region.maker.get(result)) is not None:
        traits, operands = region.ops[at].op.traits, region.ops[at].operands
        is_pair = traits.is_elementwise and len(operands) == 2
        for k in traits.accumulates if is_pair else ():
            mine, back = _passed(region, operands[k])
            if mine == carry:
                return Sum(operands[1 - k], traits.reducer, (*steps, at, *back))
    return Sum(value, "unchanged", ())


def _passed(region: FlatRegion, value: int) -> tuple[int, list[int]]:
    """Trace a value back through converts and sharding constraints.

    Returns:
      The value that it comes from, and positions of these ops.
    """
    steps = []
    while (at := region.maker.get(value)) is not None and passes_on(region.ops[at].op):
        steps.append(at)
        (value,) = region.ops[at].operands
    return value, steps
