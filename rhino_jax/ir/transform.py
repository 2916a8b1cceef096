"""Transforms: the record of the passes that were applied to a program before planning.
Interleaved (block-cyclic) storage of dims is what one of them chooses.

A weight `(d, 3·f)` that is split into three parts of `f` columns is stored, in the
user's program, as all of the first part, then all of the second, then all of the third.
A device that holds a contiguous quarter of it does not hold a quarter of every part.
Interleaved in four blocks, it is stored as a quarter of the first part, of the second
and of the third, then the next quarters: each device holds everything that its share of
a split needs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


FORMS = "forms"
UNROLL = "unroll"
UN_REMAT = "un-remat"
CHUNKS = "chunks"
MICROBATCHES = "micro-batches"
RECOMPUTE = "recompute"
DEFERRED_REDUCTIONS = "deferred reductions"
BLOCKS = "stored in blocks"
JOINED = "interleaved batches"
ONE_PROGRAM = "one program"
EXPERTS = "experts"
STACKED = "stacked"
OFFLOADED = "offloaded state"


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


@dataclass(frozen=True, slots=True)
class InterleavedOrder:
    """The order of a dim in interleaved storage.

    Attributes:
      parts: sizes of the parts in the user's program, in order, in elements.
      count: number of blocks, each with an equal share of every part.
    """

    parts: tuple[int, ...]
    count: int

    @property
    def size(self) -> int:
        """Number of elements of the dim."""
        return sum(self.parts)

    @property
    def is_whole(self) -> bool:
        """Whether every part divides evenly among the blocks."""
        return all(part % self.count == 0 for part in self.parts)

    def scaled(self, times: int = 1, over: int = 1) -> InterleavedOrder | None:
        """Return the order of a dim with `times / over` elements for each one of this
        dim; None where some block's share of a part is no whole number of elements."""
        if any(part * times % over for part in self.parts):
            return None
        found = InterleavedOrder(
            tuple(part * times // over for part in self.parts), self.count
        )
        return found if found.is_whole else None

    def between(self, start: int, stop: int) -> InterleavedOrder | None:
        """Return the order of the slice from `start` to `stop`, positions in the user's
        order; None where the slice does not consist of whole parts."""
        bounds = [sum(self.parts[:i]) for i in range(len(self.parts) + 1)]
        if start >= stop or start not in bounds or stop not in bounds:
            return None
        parts = self.parts[bounds.index(start) : bounds.index(stop)]
        return InterleavedOrder(parts, self.count)

    def __str__(self) -> str:
        return f"{self.count} blocks of {' + '.join(map(str, self.parts))}"


Stored = Mapping[tuple[int, int], InterleavedOrder]
"""(position in `Program.inputs`, dim) → interleaved order of that dim."""


def as_text(stored: Stored) -> str:
    """Serialise interleaved storage as the `choice` of a `Transform`; empty if there is
    none."""
    said = [
        [slot, dim, list(blocks.parts), blocks.count]
        for (slot, dim), blocks in sorted(stored.items())
    ]
    return json.dumps(said, separators=(",", ":")) if said else ""


def from_text(choice: str) -> dict[tuple[int, int], InterleavedOrder]:
    """Parse the text that `as_text` returns."""
    return {
        (slot, dim): InterleavedOrder(tuple(parts), count)
        for slot, dim, parts, count in json.loads(choice or "[]")
    }


def stored_in_blocks(
    transforms: Iterable[Transform],
) -> dict[int, tuple[tuple[int, InterleavedOrder], ...]]:
    """Return, by position of an input, its dims in interleaved storage and their
    orders."""
    found: dict[int, tuple[tuple[int, InterleavedOrder], ...]] = {}
    for transform in transforms:
        if transform.name == BLOCKS:
            for (slot, dim), blocks in sorted(from_text(transform.choice).items()):
                found[slot] = (*found.get(slot, ()), (dim, blocks))
    return found
