"""Transforms: the record of the passes that were applied to a program before
planning."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


UNROLL = "unroll"
UN_REMAT = "un-remat"
CHUNKS = "chunks"
MICROBATCHES = "micro-batches"
RECOMPUTE = "recompute"
DEFERRED_REDUCTIONS = "deferred reductions"
BLOCKS = "stored in blocks"
ONE_PROGRAM = "one program"


@dataclass(frozen=True, slots=True)
class Transform:
    """A pass from program to program that changed something.

    The results of the program stay those of the user's program, except where sums over
    the batch are taken per micro-batch on request (`through_own_sums`).

    Attributes:
      name: such as "dead code".
      ops_before, ops_after: number of ops of the program, including regions.
      choice: for a pass that was chosen among alternatives, the parameters with which
        it is applied again (see `rhino_jax.passes`), as JSON; empty where it follows
        from the program.
    """

    name: str
    ops_before: int
    ops_after: int
    choice: str = ""

    @property
    def chosen(self) -> Any:
        """The decoded `choice`."""
        return json.loads(self.choice)


def chosen(name: str, choice: Any) -> Transform:
    """Return the record of a pass that has not run yet.

    Args:
      name: name of the pass.
      choice: its parameters, serialisable as JSON.
    """
    return Transform(name, 0, 0, json.dumps(choice, sort_keys=True))


def through_own_sums(transforms: Iterable[Transform]) -> tuple[Transform, ...]:
    """Return the transforms up to the one that takes sums over the batch per
    micro-batch, after which results differ from the user's program; empty where there
    is none."""
    found = tuple(transforms)
    for i, transform in enumerate(found):
        if transform.name == MICROBATCHES and transform.choice:
            if transform.chosen.get("per_microbatch"):
                return found[: i + 1]
    return ()


def num_microbatches(transforms: Iterable[Transform]) -> int:
    """Return the number of micro-batches that these transforms split a batch into, or
    1."""
    for transform in transforms:
        if transform.name == MICROBATCHES and transform.choice:
            return int(transform.chosen["count"])
    return 1


def stages_in_one(transforms: Iterable[Transform]) -> int:
    """Return the number of stages of the SPMD pipeline that these transforms build, or
    1."""
    for transform in transforms:
        if transform.name == ONE_PROGRAM and transform.choice:
            return int(transform.chosen["stages"])
    return 1
