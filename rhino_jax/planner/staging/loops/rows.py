"""Stages in a row, on which parts of loops may lie."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LoopStages:
    """Stages in a row, on which parts of a loop lie.

    Attributes:
      first: of them.
      count: how many; 1: the loop is whole.
    """

    first: int
    count: int

    @property
    def last(self) -> int:
        return self.first + self.count - 1


def choices_of(length: int, shares: Sequence[int]) -> list[LoopStages]:
    """Where so many layers may lie in parts like the groups' shares."""
    found = []
    for first in range(len(shares)):
        for count in range(1, len(shares) - first + 1):
            mine = shares[first : first + count]
            # Among the devices of a larger group its part is cut by layers, too.
            if count == 1 or (length % sum(mine) == 0 and min(mine) == 1):
                found.append(LoopStages(first, count))
    return found


def rows_of(
    choices: Sequence[Sequence[LoopStages]], after: Sequence[set[int]]
) -> Iterator[tuple[LoopStages, ...]]:
    """Where parts of all loops may lie: of what comes after others, none before theirs
    end."""

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
