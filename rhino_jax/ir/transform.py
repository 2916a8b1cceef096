"""What was done to a program before it was planned."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


UN_REMAT = "un-remat"
CHUNKS = "chunks"
MICROBATCHES = "micro-batches"
RECOMPUTE = "recompute"
PARTIAL_SUMS = "partial sums"
BLOCKS = "stored in blocks"
ONE_PROGRAM = "one program"


@dataclass(frozen=True, slots=True)
class Transform:
    """A pass from program to program that found something to change.

    Results are those of the program as its user wrote it, but for sums over the batch
    that it was asked to take of each micro-batch (`through_own_sums`).

    Attributes:
      name: as "dead code".
      ops_before, ops_after: ops of the program, regions included.
      choice: of a pass that was chosen among others, what it needs to be done again
        (see `rhino_jax.passes`), as JSON; empty where it follows from the program.
    """

    name: str
    ops_before: int
    ops_after: int
    choice: str = ""

    @property
    def chosen(self) -> Any:
        """What was chosen, read."""
        return json.loads(self.choice)


def chosen(name: str, choice: Any) -> Transform:
    """A pass that is yet to be done."""
    return Transform(name, 0, 0, json.dumps(choice, sort_keys=True))


def through_own_sums(transforms: Iterable[Transform]) -> tuple[Transform, ...]:
    """These up to where sums over the batch become those of each micro-batch, so that
    results are no longer those of the program as it was; empty where they stay."""
    found = tuple(transforms)
    for i, transform in enumerate(found):
        if transform.name == MICROBATCHES and transform.choice:
            if transform.chosen.get("per_microbatch"):
                return found[: i + 1]
    return ()


def num_microbatches(transforms: Iterable[Transform]) -> int:
    """How many micro-batches these make of a batch; 1 where it is not cut."""
    for transform in transforms:
        if transform.name == MICROBATCHES and transform.choice:
            return int(transform.chosen["count"])
    return 1


def stages_in_one(transforms: Iterable[Transform]) -> int:
    """How many stages of one program these make; 1 where there are none."""
    for transform in transforms:
        if transform.name == ONE_PROGRAM and transform.choice:
            return int(transform.chosen["stages"])
    return 1
