"""Which sums are left open, as records and as text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


Split = tuple[tuple[int, int], ...]
"""Of an op whose sum is left open: (piece, factor), for every piece of the group the
factor that is divided by it; of one factor major first."""


@dataclass(frozen=True, slots=True)
class DeferredGroup:
    """Partial sums that are open over the same mesh axes.

    Attributes:
      pieces: sizes of the dims that open values have in front, one for every mesh axis.
      made: op id → how its summed factors are divided; its result is open.
      open: ids of the values that are held open; all else is summed when it is read.
    """

    pieces: tuple[int, ...]
    made: Mapping[int, Split]
    open: frozenset[int]


def as_text(groups: Iterable[DeferredGroup]) -> str:
    """The choice that `delayed` takes; empty where there is no group."""
    said = [
        {
            "pieces": list(group.pieces),
            "made": {str(op): split for op, split in sorted(group.made.items())},
            "open": sorted(group.open),
        }
        for group in groups
    ]
    return json.dumps(said, separators=(",", ":")) if said else ""


def from_text(choice: str) -> Sequence[DeferredGroup]:
    """What `as_text` wrote."""
    return [
        DeferredGroup(
            tuple(said["pieces"]),
            {
                int(op): tuple((piece, factor) for piece, factor in split)
                for op, split in said["made"].items()
            },
            frozenset(said["open"]),
        )
        for said in json.loads(choice or "[]")
    ]
