"""A step whose sequences run in slices, as tasks: a chunk for every slice and part of
the model.

A slice reads what slices before it made in the same part of the model or an earlier
one. So chunks are numbered slice by slice, those of one along the model: then each
reads of none after it, and backward passes the other way round. What slices of one part
leave for one another (keys and values, gradients of these, sums of gradients of
weights) is between chunks of one group, which holds it.
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
    remade: StagedRemat = NOTHING,
    together: Sequence[Collection[int]] = (),
) -> StagedStep:
    """The tasks of a step, a slice of its sequences after the other.

    Args:
      apart: the step.
      stages: of every forward equation of a whole micro-batch its part of the model,
        from 0 on; each reads only what is made in its own part or an earlier one.
      group_of: of every part its group.
      lengths: of the slices, in tokens.
      remade: what backward passes make again of forward passes; by chunks.
      together: as of `staged`.
    Raises:
      ScheduleError: a later slice may change what an earlier one makes, or the lengths
        are not those of a sequence.
    """
    cut = sliced(apart, lengths)
    own = replace(apart, piece=cut.piece)
    sides = sides_of(own)
    at = chunks_of(sides_of(apart), stages, cut, sides, len(group_of))
    own = replace(own, at=tuple(at))
    chunks = [c for i in sides.forward if (c := at[i]) is not None]
    every = (*group_of,) * len(lengths)
    step = staged(own, chunks, every, remade=remade, together=together)
    _check_order(step, len(group_of), apart.cut.program.name)
    return step


def _check_order(step: StagedStep, parts: int, name: str) -> None:
    """Refuse slices that pass over the model against its order.

    Args:
      step: the tasks.
      parts: of the model; the tasks of a part are so many chunks apart.
      name: of the program.
    Raises:
      TokenSliceError: a part reads what a part after it makes of another slice (going
        backward: a part before it), for which it would not wait.
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
    """Of every equation in slices its chunk: what a slice has of one is where that was.

    What is made of weights alone is where it is read first; in backward passes, where
    that is, is not said.

    Args:
      whole, stages: a whole micro-batch, and of its forward equations their parts of
        the model.
      cut, sides: the same in slices.
      parts: of the model.
    """
    lines = sides.lines
    placed = whole.placed(dict(zip(whole.forward, stages, strict=True)))
    slices = [*cut.slice_of]
    for i in reversed(sides.forward):
        if slices[i] is None:
            later = {r for v in lines.makes[i] for r in sides.readers.get(v, ())}
            read = (slices[r] for r in later if not sides.is_backward[r])
            slices[i] = min((t for t in read if t is not None), default=0)
    found: list[int | None] = []
    for source, at in zip(cut.source, slices, strict=True):
        part = None if source is None else placed[source]
        found.append(None if part is None or at is None else at * parts + part)
    return found
