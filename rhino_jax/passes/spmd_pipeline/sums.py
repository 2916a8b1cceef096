"""How a micro-batch's part is added to what those before have left."""

from __future__ import annotations

from dataclasses import dataclass

from rhino_jax.passes.microbatch.flow.accumulated import COMBINING
from rhino_jax.passes.spmd_pipeline.along import PLAIN
from rhino_jax.passes.staged.lines import Lines


@dataclass(frozen=True, slots=True)
class Sum:
    """What micro-batches leave together, a carry of the loop over them.

    Attributes:
      part: value of one micro-batch; None: the carry leaves as it came.
      how: it is combined; "unchanged": all micro-batches leave the same.
      steps: equations that do so.
    """

    part: int | None
    how: str
    steps: tuple[int, ...]


def sum_of(lines: Lines, carry: int, position: int) -> Sum:
    """How a carry is made of what it was and of a micro-batch's part."""
    value = lines.outputs[position]
    carry = lines.inputs[carry]
    if value is None or value == carry:
        return Sum(None, "unchanged", ())
    steps: list[int] = []
    result = value
    while (at := lines.maker.get(result)) is not None:
        eqn = lines.eqns[at]
        name = eqn.primitive.name
        if name in PLAIN:
            steps.append(at)
            (result,) = lines.reads[at]
            continue
        if name not in COMBINING or len(lines.reads[at]) != 2:
            break
        for mine, part in (lines.reads[at], lines.reads[at][::-1]):
            back = _back(lines, mine)
            if back is not None and back[0] == carry:
                return Sum(part, COMBINING[name], (*steps, at, *back[1]))
        break
    return Sum(value, "unchanged", ())


def _back(lines: Lines, value: int) -> tuple[int, list[int]] | None:
    """Where a value comes from, but for what only converts or places it."""
    steps = []
    while (at := lines.maker.get(value)) is not None:
        if lines.eqns[at].primitive.name not in PLAIN:
            return None
        steps.append(at)
        (value,) = lines.reads[at]
    return value, steps
