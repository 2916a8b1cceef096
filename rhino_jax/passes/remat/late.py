"""Late ops of a region: those of the backward pass, and all that depend on these; and
the residuals that forward loops stack for loops among them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from rhino_jax.rewrite.flat import (
    FlatProgram,
    FlatRegion,
)


@dataclass(frozen=True, slots=True, eq=False)
class Halves:
    """A region with its ops divided into early (forward) and late (backward and after).

    Attributes:
      block: the region.
      is_late: [ops], whether reverse differentiation made the op, or it depends on such
        an op.
      late_uses: value of an early op → positions of the late ops that read it.
      bound: values that are live to the end of the region, whatever is chosen.
    """

    block: FlatRegion
    is_late: tuple[bool, ...]
    late_uses: dict[int, tuple[int, ...]]
    bound: frozenset[int]

    def is_early(self, value: int) -> bool:
        """Whether an early op of the region produces the value."""
        line = self.block.maker.get(value)
        return line is not None and not self.is_late[line]


def halves_of(block: FlatRegion) -> Halves:
    """Divide a region into early and late ops; either set may be empty."""
    return with_late(block, _late_lines(block))


def with_late(block: FlatRegion, is_late: Sequence[bool]) -> Halves:
    """Divide a region, given which of its ops are late.

    Args:
      block: the region.
      is_late: [ops], whether each op is late.
    """
    uses: dict[int, list[int]] = defaultdict(list)
    for k, line in enumerate(block.ops):
        if is_late[k]:
            for v in dict.fromkeys(line.operands):
                if v in block.maker and not is_late[block.maker[v]]:
                    uses[v].append(k)
    return Halves(
        block,
        tuple(is_late),
        {v: tuple(at) for v, at in uses.items()},
        frozenset(block.outputs),
    )


def _late_lines(block: FlatRegion) -> list[bool]:
    is_late: list[bool] = []
    late_values: set[int] = set()
    for line in block.ops:
        is_late.append(
            line.op.source.is_backward or any(v in late_values for v in line.operands)
        )
        if is_late[-1]:
            late_values.update(line.results)
    if True not in is_late:
        return is_late
    # Ops after the first gradient whose results only late ops read, as an optimizer's
    # decay of a momentum, are late too.
    early_needs, start = set(block.outputs), is_late.index(True)
    for k in reversed(range(len(block.ops))):
        line = block.ops[k]
        if not is_late[k] and k > start:
            is_late[k] = bool(line.results) and early_needs.isdisjoint(line.results)
        if not is_late[k]:
            early_needs.update(line.operands)
    return is_late


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
