"""The user's sequence slices in `schedule=`: `token-slices:4`, or their lengths."""

from __future__ import annotations

import re
from typing import Any

from rhino_jax.errors import ScheduleError
from rhino_jax.pipeline.schedules.sequence_slices import TOKEN_SLICES
from rhino_jax.utils.keywords import brief, read_choice


FEW = (1, 2, 4)
"""Numbers of micro-batches that are compared where slices fill the pipeline: all are in
flight at once, so more of them need no less memory."""

FORMS = (
    f'write "{TOKEN_SLICES}" for slices that rhino chooses, "{TOKEN_SLICES}:4" for'
    f' four, or "{TOKEN_SLICES}:512,384,128" for slices of so many tokens'
)


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
