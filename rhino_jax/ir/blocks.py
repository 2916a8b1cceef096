"""Dims that are stored in blocks: which elements of an array lie where.

A weight `(d, 3·f)` that is split into three parts of `f` columns is, as written, all of
the first part, then all of the second, then all of the third. A device that holds a
contiguous quarter of it has no quarter of every part. In four blocks it is a quarter of
the first part, of the second and of the third, then the next quarters: what every
device holds is all that its share of a split needs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rhino_jax.ir.transform import BLOCKS, Transform


@dataclass(frozen=True, slots=True)
class InterleavedOrder:
    """The order of a dim that is stored in blocks.

    Attributes:
      parts: sizes of the parts that it has as written, in order.
      count: how many blocks there are, each with an equal share of every part.
    """

    parts: tuple[int, ...]
    count: int

    @property
    def size(self) -> int:
        """Elements of the dim."""
        return sum(self.parts)

    @property
    def is_whole(self) -> bool:
        """Whether every block has a share of every part."""
        return all(part % self.count == 0 for part in self.parts)

    def scaled(self, times: int = 1, over: int = 1) -> InterleavedOrder | None:
        """Of a dim whose every element is `times / over` elements of this one; None
        where no whole number of elements is left of some share."""
        if any(part * times % over for part in self.parts):
            return None
        found = InterleavedOrder(
            tuple(part * times // over for part in self.parts), self.count
        )
        return found if found.is_whole else None

    def between(self, start: int, stop: int) -> InterleavedOrder | None:
        """Of the elements from `start` to `stop`, as written; None where these are no
        whole parts."""
        bounds = [sum(self.parts[:i]) for i in range(len(self.parts) + 1)]
        if start >= stop or start not in bounds or stop not in bounds:
            return None
        parts = self.parts[bounds.index(start) : bounds.index(stop)]
        return InterleavedOrder(parts, self.count)

    def __str__(self) -> str:
        return f"{self.count} blocks of {' + '.join(map(str, self.parts))}"


Stored = Mapping[tuple[int, int], InterleavedOrder]
"""(position in `Program.inputs`, dim) → how that dim is stored."""


def as_text(stored: Stored) -> str:
    """What is stored in blocks, as the choice of a `Transform`; empty for nothing."""
    said = [
        [slot, dim, list(blocks.parts), blocks.count]
        for (slot, dim), blocks in sorted(stored.items())
    ]
    return json.dumps(said, separators=(",", ":")) if said else ""


def from_text(choice: str) -> dict[tuple[int, int], InterleavedOrder]:
    """What `as_text` wrote."""
    return {
        (slot, dim): InterleavedOrder(tuple(parts), count)
        for slot, dim, parts, count in json.loads(choice or "[]")
    }


def stored_in_blocks(
    transforms: Iterable[Transform],
) -> dict[int, tuple[tuple[int, InterleavedOrder], ...]]:
    """Position of an input → its dims that are stored in blocks, and how."""
    found: dict[int, tuple[tuple[int, InterleavedOrder], ...]] = {}
    for transform in transforms:
        if transform.name == BLOCKS:
            for (slot, dim), blocks in sorted(from_text(transform.choice).items()):
                found[slot] = (*found.get(slot, ()), (dim, blocks))
    return found
