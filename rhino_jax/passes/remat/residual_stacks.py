"""Residuals that forward loops stack for loops of the backward pass."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from rhino_jax.passes.remat.late import Halves
from rhino_jax.rewrite.flat import (
    FlatProgram,
)


@dataclass(frozen=True, slots=True)
class ResidualStack:
    """A stacked result of a forward loop that only backward loops read, slice by slice.

    Attributes:
      value: its id.
      loop: position of the forward loop in the region.
      slot: index among the loop's stacked results.
      inside: id of the value in the loop's body that is stacked.
      readers: (position of a backward loop, index of the operand that it reads it as).
    """

    value: int
    loop: int
    slot: int
    inside: int
    readers: tuple[tuple[int, int], ...]


def find_stacks(flat: FlatProgram, halves: Halves) -> tuple[ResidualStack, ...]:
    """Return all residual stacks of a region."""
    block = halves.block
    reads: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for k, line in enumerate(block.ops):
        for position, v in enumerate(line.operands):
            reads[v].append((k, position))
    found: list[ResidualStack] = []
    for k, line in enumerate(block.ops):
        if halves.is_late[k] or not flat.can_change(line):
            continue
        call, body = line.call, line.regions[0]
        made = zip(call.stacked(line.results), call.stacked(body.outputs), strict=True)
        for slot, (value, inside) in enumerate(made):
            readers = [(block.ops[at], at, position) for at, position in reads[value]]
            if (
                readers
                and value not in halves.bound
                and all(
                    halves.is_late[at]
                    and flat.can_change(reader)
                    and reader.call.trip_count == call.trip_count
                    and position >= reader.call.first_slice
                    for reader, at, position in readers
                )
            ):
                found.append(ResidualStack(value, k, slot, inside, tuple(reads[value])))
    return tuple(found)
