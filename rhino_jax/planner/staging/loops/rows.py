"""Consecutive stages, over which loops are split."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LoopStages:
    """Consecutive stages that hold the parts of a loop.

    Attributes:
      first: the first of them.
      count: the number of stages; 1: the loop is whole.
    """

    first: int
    count: int

    @property
    def last(self) -> int:
        """The last stage."""
        return self.first + self.count - 1


def choices_of(length: int, shares: Sequence[int]) -> list[LoopStages]:
    """Return the consecutive stages over which some layers can be split in proportion
    to the submeshes' shares."""
    found = []
    for first in range(len(shares)):
        for count in range(1, len(shares) - first + 1):
            mine = shares[first : first + count]
            # A larger submesh shards its part by layers, too.
            if count == 1 or (length % sum(mine) == 0 and min(mine) == 1):
                found.append(LoopStages(first, count))
    return found


def rows_of(
    choices: Sequence[Sequence[LoopStages]], after: Sequence[set[int]]
) -> Iterator[tuple[LoopStages, ...]]:
    """Yield the stages of all loops; a loop that comes after another starts no earlier
    than the stage where that one ends."""

    def rest(rows: tuple[LoopStages, ...]) -> Iterator[tuple[LoopStages, ...]]:
        at = len(rows)
        if at == len(choices):
            yield rows
            return
        for row in choices[at]:
            is_late = all(rows[f].last <= row.first for f in after[at] if f < at)
            is_early = all(
                row.last <= rows[g].first for g in range(at) if at in after[g]
            )
            if is_late and is_early:
                yield from rest((*rows, row))

    return rest(())
