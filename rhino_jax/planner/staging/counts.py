"""Candidate numbers of micro-batches, where rhino chooses."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from rhino_jax.errors import MicrobatchError, ScheduleError
from rhino_jax.ir.program import Program
from rhino_jax.passes.microbatch.choice import MicrobatchChoice
from rhino_jax.passes.staged.apart import MAX_LOOPS, cut_for_stages
from rhino_jax.pipeline.schedules.sequence_slices import TOKEN_SLICES


PER_STAGE = ((4, 2, 8), (16,), (32,), (64,))
"""Micro-batches per stage that are compared where rhino chooses, and numbers that are
tried after them where nothing fits: their activations are smaller. Meshes are compared
for the first of them."""


def rows_of(
    closed: Any,
    program: Program,
    places: tuple[str, ...],
    most_loops: int = MAX_LOOPS,
) -> int:
    """Return the number of rows of a step's batch.

    Args:
      closed: closed jaxpr of the step; `program`: imported from it.
      places: places where sums over the batch are taken over each micro-batch.
      most_loops: see `MicrobatchChoice`.
    Raises:
      MicrobatchError: the step has no batch that can be split.
    """
    choice = MicrobatchChoice(1, most_loops=most_loops, per_microbatch=places, least=1)
    return cut_for_stages(closed, program, choice)[0].rows


def data_of(closed: Any, program: Program, places: tuple[str, ...]) -> tuple[int, ...]:
    """Return the value ids of the inputs that hold a step's batch; see `rows_of`."""
    choice = MicrobatchChoice(1, most_loops=MAX_LOOPS, per_microbatch=places, least=1)
    return cut_for_stages(closed, program, choice)[0].inputs


def counts_of(rows: int, stages: int, multiple_of: int = 1) -> Iterator[list[int]]:
    """Yield lists of numbers of micro-batches to be compared; each is for where nothing
    of those before fits.

    Args:
      rows: rows of the batch, which each number divides.
      stages: the number of stages.
      multiple_of: a divisor of each number.
    """
    counts = [n for n in range(2, rows + 1) if rows % n == 0 and n % multiple_of == 0]
    seen = set[int]()
    for factors in PER_STAGE if counts else ():
        found = [n for n in _nearest(counts, stages, factors) if n not in seen]
        seen.update(found)
        if found:
            yield found


def _nearest(counts: Sequence[int], stages: int, factors: Sequence[int]) -> list[int]:
    """Return the candidates nearest to some numbers of micro-batches per stage."""
    near = (
        min(counts, key=lambda n: (abs(math.log(n / (k * stages))), n)) for k in factors
    )
    return list(dict.fromkeys(near))


def one_micro_batch(
    name: str, stages: int, rows: int, refused: ScheduleError | None
) -> MicrobatchError:
    """Return the error of a training step that is to run in one micro-batch.

    Args:
      name: the name of the step; `stages`: the number of stages.
      rows: rows of its batch.
      refused: why its sequences cannot be sliced; None where they can.
    """
    numbers, fixes = f"{stages} stages", ["stages=1"]
    if refused is None:
        fixes.insert(0, f'schedule="{TOKEN_SLICES}"')
    else:
        numbers += f"; in slices of its sequences: {refused.what}"
    two = "take two or more micro-batches" if rows > 1 else "give two rows or more"
    return MicrobatchError(
        f"`{name}` cannot run in 1 micro-batch: all stages but one would be idle.",
        where=refused.where if refused else "`microbatches=`",
        numbers=numbers,
        fix=f"{two}; or {'; or '.join(fixes)}.",
    )
