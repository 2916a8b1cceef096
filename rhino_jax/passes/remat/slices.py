"""Stacks that a loop reads slice by slice, when it runs whole or as two loops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
from jax import lax


@dataclass(frozen=True, slots=True)
class LoopRange:
    """A range of a loop's steps.

    Attributes:
      number: 0 for the first range, 1 for the second.
      start, stop: slices that the range covers.
    """

    number: int
    start: int
    stop: int


@dataclass(slots=True, eq=False)
class SlicedStacks:
    """Stacks of which each step reads a slice.

    A range of a loop reads slices of whole stacks by index, since a slice of the stack
    for the range would be a copy of it.

    Attributes:
      part: range of the loop; None: the loop runs whole.
      stacks: the stacks.
      is_part: for each stack, whether it has only the slices of this range.
    """

    part: LoopRange | None
    stacks: list[Any] = field(default_factory=list)
    is_part: list[bool] = field(default_factory=list)

    def add(self, stack: Any, is_part: bool) -> int:
        """Add a stack if it is new, and return its position."""
        for i, other in enumerate(self.stacks):
            if other is stack:
                return i
        self.stacks.append(stack)
        self.is_part.append(is_part or self.part is None)
        return len(self.stacks) - 1

    def scanned(self) -> list[Any]:
        """Return the arrays that the loop scans over."""
        found = [x for x, p in zip(self.stacks, self.is_part, strict=True) if p]
        if self.part is not None:
            count = self.part.stop - self.part.start
            numbers = lax.iota(jnp.int32, count) + jnp.int32(self.part.start)
            found.append(numbers)
        return found

    def at_step(self, scanned: Sequence[Any]) -> list[Any]:
        """Return the slices of a step, given the step's slices of `scanned`."""
        number = scanned[-1] if self.part is not None else None
        rest = iter(scanned)
        return [
            next(rest)
            if is_part
            else lax.dynamic_index_in_dim(stack, number, 0, keepdims=False)
            for stack, is_part in zip(self.stacks, self.is_part, strict=True)
        ]
