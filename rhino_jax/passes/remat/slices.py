"""What a loop reads slice by slice, when it runs whole or in two parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
from jax import lax


@dataclass(frozen=True, slots=True)
class LoopRange:
    """Some steps of a loop.

    Attributes:
      number: 0 for those of the first slices, 1 for the others.
      start, stop: which slices.
    """

    number: int
    start: int
    stop: int


@dataclass(slots=True, eq=False)
class SlicedStacks:
    """Stacks of which each step reads a slice.

    A part of a loop reads slices of whole stacks by their number, since a part of a
    stack would be a copy of it.

    Attributes:
      part: of the loop, if it runs in parts.
      stacks: the stacks.
      is_part: whether each has the slices of this part alone.
    """

    part: LoopRange | None
    stacks: list[Any] = field(default_factory=list)
    is_part: list[bool] = field(default_factory=list)

    def add(self, stack: Any, is_part: bool) -> int:
        """The place of a stack among them."""
        for i, other in enumerate(self.stacks):
            if other is stack:
                return i
        self.stacks.append(stack)
        self.is_part.append(is_part or self.part is None)
        return len(self.stacks) - 1

    def scanned(self) -> list[Any]:
        """What the loop scans over."""
        found = [x for x, p in zip(self.stacks, self.is_part, strict=True) if p]
        if self.part is not None:
            count = self.part.stop - self.part.start
            numbers = lax.iota(jnp.int32, count) + jnp.int32(self.part.start)
            found.append(numbers)
        return found

    def at_step(self, scanned: Sequence[Any]) -> list[Any]:
        """The slices of a step, of what is scanned over."""
        number = scanned[-1] if self.part is not None else None
        rest = iter(scanned)
        return [
            next(rest)
            if is_part
            else lax.dynamic_index_in_dim(stack, number, 0, keepdims=False)
            for stack, is_part in zip(self.stacks, self.is_part, strict=True)
        ]
