"""A step whose sequences run in slices, as tasks: a chunk for every slice and part of
the model.

A slice reads what slices before it made in the same part of the model or an earlier
one. So chunks are numbered slice by slice, those of one along the model: then each
reads of none after it, and backward passes the other way round. What slices of one part
leave for one another (keys and values, gradients of these, sums of gradients of
weights) is between chunks of one group, which holds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rhino_jax.transform.staged.apart import Apart
from rhino_jax.transform.staged.remade import Remade
from rhino_jax.transform.staged.sides import Sides, sides_of
from rhino_jax.transform.staged.staging import NOTHING, staged
from rhino_jax.transform.staged.step import Step
from rhino_jax.transform.token_slices.sliced import Sliced, sliced


def staged_in_slices(
    apart: Apart,
    stages: Sequence[int],
    group_of: Sequence[int],
    lengths: Sequence[int],
    *,
    remade: Remade = NOTHING,
) -> Step:
    """The tasks of a step, a slice of its sequences after the other.

    Args:
      apart: the step.
      stages: of every forward equation of a whole micro-batch its part of the model,
        from 0 on; each reads only what is made in its own part or an earlier one.
      group_of: of every part its group.
      lengths: of the slices, in tokens.
      remade: what backward passes make again of forward passes; by chunks.
    Raises:
      ScheduleError: a later slice may change what an earlier one makes, or the lengths
        are not those of a sequence.
    """
    cut = sliced(apart, lengths)
    own = replace(apart, piece=cut.piece)
    parts = len(group_of)
    chunks = chunks_of(sides_of(apart), stages, cut, sides_of(own), parts)
    groups, slices = (*group_of,) * len(lengths), len(lengths)
    return staged(own, chunks, groups, remade=remade, slices=slices)


def chunks_of(
    whole: Sides, stages: Sequence[int], cut: Sliced, sides: Sides, parts: int
) -> list[int]:
    """Of every forward equation in slices its chunk.

    What a slice has of an equation is where that was. What joins slices is where it is
    read first: what it joins is sent when it is made, and once.

    Args:
      whole, stages: a whole micro-batch, and of its forward equations their parts of
        the model.
      cut, sides: the same in slices.
      parts: of the model.
    """
    lines = sides.lines
    part_of = dict(zip(whole.forward, stages, strict=True))
    parts_of: dict[int, int] = {}
    slices: dict[int, int] = {}
    for i in reversed(sides.forward):
        later = {r for v in lines.makes[i] for r in sides.readers.get(v, ())}
        ahead = sorted(later & parts_of.keys())
        source = cut.source[i]
        known = None if source is None else part_of.get(source)
        if known is None:
            known = min((parts_of[r] for r in ahead), default=None)
        # What is read by backward passes alone is where what it reads is.
        parts_of[i] = -1 if known is None else known
        own = cut.slice_of[i]
        slices[i] = min((slices[r] for r in ahead), default=0) if own is None else own
    found = []
    for i in sides.forward:
        made = [lines.maker[v] for v in lines.reads[i] if v in lines.maker]
        before = [j for j in made if j in parts_of]
        least = max((parts_of[j] for j in before), default=0)
        parts_of[i] = max(parts_of[i], least)
        slices[i] = max([slices[i], *(slices[j] for j in before)])
        found.append(slices[i] * parts + parts_of[i])
    return found
