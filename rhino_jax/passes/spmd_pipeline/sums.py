"""Carries of the loop over micro-batches, and how they accumulate."""

from __future__ import annotations

from dataclasses import dataclass

from rhino_jax.frontend.registry import traits_of
from rhino_jax.passes.spmd_pipeline.along import passes_on
from rhino_jax.rewrite.equations import Equations


@dataclass(frozen=True, slots=True)
class Sum:
    """An output that micro-batches accumulate, a carry of the loop over them.

    Attributes:
      part: value of one micro-batch that is accumulated; None: the carry is passed
        through.
      how: its reducer, as "sum"; "unchanged": all micro-batches output the same value.
      steps: equations that accumulate it.
    """

    part: int | None
    how: str
    steps: tuple[int, ...]


def sum_of(lines: Equations, carry: int, position: int) -> Sum:
    """Return how a carry accumulates.

    Args:
      lines: equations of a micro-batch.
      carry: position of the carry among the inputs.
      position: of it among the outputs.
    """
    value = lines.outputs[position]
    carry = lines.inputs[carry]
    if value is None or value == carry:
        return Sum(None, "unchanged", ())
    steps: list[int] = []
    result = value
    while (at := lines.maker.get(result)) is not None:
        eqn = lines.eqns[at]
        if passes_on(eqn):
            steps.append(at)
            (result,) = lines.reads[at]
            continue
        traits, reads = traits_of(eqn.primitive.name), lines.reads[at]
        if not traits.is_elementwise or len(reads) != 2:
            break
        for k in traits.accumulates:
            mine, part = reads[k], reads[1 - k]
            back = _back(lines, mine)
            if back is not None and back[0] == carry:
                return Sum(part, traits.reducer, (*steps, at, *back[1]))
        break
    return Sum(value, "unchanged", ())


def _back(lines: Equations, value: int) -> tuple[int, list[int]] | None:
    """Trace a value back through converts and sharding constraints.

    Returns:
      The value that it comes from, and these equations; None where other ops compute
        it.
    """
    steps = []
    while (at := lines.maker.get(value)) is not None:
        if not passes_on(lines.eqns[at]):
            return None
        steps.append(at)
        (value,) = lines.reads[at]
    return value, steps
