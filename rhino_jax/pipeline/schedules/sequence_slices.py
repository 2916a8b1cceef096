"""Sequence slices in a pipeline (TeraPipe), and the user's slices in `schedule=`:
`token-slices:4`, or their lengths."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product
from typing import Any

from rhino_jax.errors import ScheduleError
from rhino_jax.pipeline.schedules.family import (
    BACKWARD,
    FORWARD,
    Step,
    family,
    in_order,
)
from rhino_jax.pipeline.tasks import Schedule
from rhino_jax.pipeline.work import StepWork
from rhino_jax.utils.keywords import brief, read_choice


TOKEN_SLICES = "token-slices"


FEW = (1, 2, 4)
"""Numbers of micro-batches that are compared where slices fill the pipeline: all are in
flight at once, so more of them need no less memory."""

FORMS = (
    f'write "{TOKEN_SLICES}" for slices that rhino chooses, "{TOKEN_SLICES}:4" for'
    f' four, or "{TOKEN_SLICES}:512,384,128" for slices of so many tokens'
)


@family(
    TOKEN_SLICES,
    "slices of the sequence, one after another",
    in_slices=True,
)
def token_slices(work: StepWork) -> Schedule:
    """Schedule the slices of all micro-batches one after another, then back in reverse.

    With few micro-batches of long sequences, slices fill the pipeline. Their lengths
    are chosen by `rhino_jax.pipeline.tera`.

    The step is divided along its sequence by `rhino_jax.passes.sequence_slices`:
    attention under a mask that is proved causal by slices, each with the keys and
    values of the slices before it, which their stage saves; the gradients of these are
    summed from the last slice to the first; and every slice has its own task, as its
    shapes differ (`rhino_jax.passes.staged.in_slices`).

    Source: Li et al., "TeraPipe: token-level pipeline parallelism for training
    large-scale language models" (arXiv 2102.07988).
    """
    if work.slices < 2:
        raise ScheduleError(
            "`token-slices` needs sequences that are cut.",
            numbers=f"{work.slices} slice in every chunk",
            fix="give every chunk one cost for every slice, or take `gpipe`.",
        )

    def order(group: int) -> Iterator[Step]:
        ahead = [*product(work.chunks_of[group], range(work.micro_batches))]
        yield from ((FORWARD, *at) for at in ahead)
        yield from ((BACKWARD, *at) for at in reversed(ahead))

    return in_order(TOKEN_SLICES, work, order)


def read_schedule(what: str, value: Any, known: tuple[str, ...]) -> str:
    """Check `schedule=`.

    Raises:
      ScheduleError: the slices are not specified so.
      RhinoError: there is no such schedule.
    """
    if not isinstance(value, str) or not value.startswith(f"{TOKEN_SLICES}:"):
        return read_choice(what, "schedule", value, known)
    numbers = value.partition(":")[2].replace(" ", "")
    if re.fullmatch(r"\d+(,\d+)*", numbers):
        found = [*map(int, numbers.split(","))]
        if min(found) > 0 and found != [1]:
            return f"{TOKEN_SLICES}:{','.join(map(str, found))}"
    raise ScheduleError(
        f"{what}: schedule {brief(value)} says neither how many slices there are, nor"
        " how long each is.",
        where="`schedule=`",
        numbers=f"after the colon: {brief(numbers)}; two slices or more, each of a"
        " token or more",
        fix=f"{FORMS}.",
    )


def slices_in(schedule: str) -> tuple[str, tuple[int, ...]]:
    """Return the schedule's name, and the slices: one number is their count, several
    are their lengths; empty: not specified."""
    name, _, numbers = schedule.partition(":")
    return name, tuple(map(int, numbers.split(","))) if numbers else ()
