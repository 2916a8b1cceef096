"""A step whose sequences run in slices, as tasks: a chunk per slice and model part.

A slice reads values of earlier slices in the same part of the model or an earlier one.
So chunks are numbered slice by slice, those of one slice along the model: then each
reads of no later chunk, and backward passes the other way round. What slices of one
part pass on (keys and values, gradients of these, sums of gradients of weights) is
between chunks of one submesh, which holds it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from rhino_jax.passes.sequence_slices.refused import against_order
from rhino_jax.passes.sequence_slices.sliced import SlicedBody, sliced
from rhino_jax.passes.staged.apart import Apart
from rhino_jax.passes.staged.remat import StagedRemat
from rhino_jax.passes.staged.sides import Sides, sides_of
from rhino_jax.passes.staged.staging import NOTHING, staged
from rhino_jax.passes.staged.step import StagedStep, TaskKind


def staged_in_slices(
    apart: Apart,
    stages: Sequence[int],
    group_of: Sequence[int],
    lengths: Sequence[int],
    *,
    remat: StagedRemat = NOTHING,
    together: Sequence[Collection[int]] = (),
) -> StagedStep:
    """Return the tasks of a step whose sequences run in slices.

    Args:
      apart: the step.
      stages: for every forward equation of a whole micro-batch its part of the model,
        from 0 on; each reads only values of its own part or an earlier one.
      group_of: for every part its submesh.
      lengths: of the slices, in tokens.
      remat: what backward passes recompute; by chunks.
      together: as of `staged`.
    Raises:
      TokenSliceError: a later slice may change values of an earlier one, or the lengths
        do not add up to the sequence.
    """
    cut = sliced(apart, lengths)
    own = replace(apart, piece=cut.piece)
    sides = sides_of(own)
    at = chunks_of(sides_of(apart), stages, cut, sides, len(group_of))
    own = replace(own, at=tuple(at))
    chunks = [c for i in sides.forward if (c := at[i]) is not None]
    every = (*group_of,) * len(lengths)
    step = staged(own, chunks, every, remat=remat, together=together)
    _check_order(step, len(group_of), apart.cut.program.name)
    return step


def _check_order(step: StagedStep, parts: int, name: str) -> None:
    """Refuse slices that pass over the model against its order.

    Args:
      step: the tasks.
      parts: how many parts the model has; the tasks of a part are that many chunks
        apart.
      name: of the program.
    Raises:
      TokenSliceError: a part reads what a later part computes of another slice (going
        backward: an earlier part), for which it would not wait.
    """
    for kind, turn in ((TaskKind.FORWARD, 1), (TaskKind.BACKWARD, -1)):
        tasks = [t for of in step.tasks for t in of if t.kind is kind]
        made_by = {key: task for task in tasks for key in task.makes}
        for task in tasks:
            for key in task.reads:
                maker = made_by.get(key, task)
                if turn * (maker.place % parts - task.place % parts) > 0:
                    raise against_order(name, step.types[key], maker, task, parts)


def chunks_of(
    whole: Sides, stages: Sequence[int], cut: SlicedBody, sides: Sides, parts: int
) -> list[int | None]:
    """Return the chunk of every equation of a sliced micro-batch.

    It is the part of the model of the equation that it is a slice of. What is no slice
    is where its pass reads it first; None where that does not.

    Args:
      whole, stages: a whole micro-batch, and for its forward equations their parts of
        the model.
      cut, sides: the same micro-batch in slices.
      parts: how many parts the model has.
    """
    region = sides.region
    placed = whole.placed(dict(zip(whole.forward, stages, strict=True)))
    slices = [*cut.slice_of]
    # Whole values are computed in the slice that reads them first: backward passes go
    # from the last slice to the first.
    back = sides.is_backward
    for ops, first in ((sides.forward, min), (sides.backward, max)):
        for i in reversed(ops):
            if slices[i] is None:
                later = {r for v in region.makes[i] for r in sides.readers.get(v, ())}
                known = (slices[r] for r in later if back[r] == back[i])
                read = [t for t in known if t is not None]
                slices[i] = first(read, default=None if back[i] else 0)
    found: list[int | None] = []
    for source, at in zip(cut.source, slices, strict=True):
        part = None if source is None else placed[source]
        found.append(None if part is None or at is None else at * parts + part)
    return found
