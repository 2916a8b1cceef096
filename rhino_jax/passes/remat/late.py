"""Late ops of a region: those of the backward pass, and all that depend on these; and
the residuals that forward loops stack for loops among them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from rhino_jax.rewrite.flat import FlatProgram, FlatRegion


@dataclass(frozen=True, eq=False)
class Halves:
    """A region with its ops divided into early (forward) and late (backward and after).

    Attributes:
      block: the region.
      is_late: [ops], whether reverse differentiation made the op, or it depends on such
        an op.
    """

    block: FlatRegion
    is_late: Sequence[bool]

    def is_early(self, value: int) -> bool:
        """Whether an early op of the region produces the value."""
        line = self.block.maker.get(value)
        return line is not None and not self.is_late[line]

    @cached_property
    def late_uses(self) -> dict[int, list[int]]:
        """Value of an early op → positions of the late ops that read it."""
        uses = defaultdict[int, list[int]](list)
        for k, line in enumerate(self.block.ops):
            for v in dict.fromkeys(line.operands) if self.is_late[k] else ():
                if self.is_early(v):
                    uses[v].append(k)
        return dict(uses)


def halves_of(block: FlatRegion) -> Halves:
    """Divide a region into early and late ops; either set may be empty."""
    late = {k for k, line in enumerate(block.ops) if line.op.source.is_backward}
    late |= block.behind(block.made_by(late))
    is_late = [k in late for k in range(len(block.ops))]
    if not late:
        return Halves(block, is_late)
    # Ops after the first gradient whose results only late ops read, as an optimizer's
    # decay of a momentum, are late too.
    early_needs, start = set(block.outputs), min(late)
    for k in reversed(range(len(block.ops))):
        line = block.ops[k]
        if not is_late[k] and k > start:
            is_late[k] = bool(line.results) and early_needs.isdisjoint(line.results)
        if not is_late[k]:
            early_needs.update(line.operands)
    return Halves(block, is_late)


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
    block, found = halves.block, list[ResidualStack]()

    def reads(at: int, position: int, length: int) -> bool:
        """Whether a late loop of as many steps reads an operand slice by slice."""
        reader = block.ops[at]
        return (
            halves.is_late[at]
            and flat.can_change(reader)
            and reader.call.trip_count == length
            and position >= reader.call.first_slice
        )

    for k, line in enumerate(block.ops):
        if halves.is_late[k] or not flat.can_change(line):
            continue
        call, body = line.call, line.regions[0]
        made = zip(call.stacked(line.results), call.stacked(body.outputs), strict=True)
        for slot, (value, inside) in enumerate(made):
            readers = tuple(
                (at, position)
                for at in block.readers.get(value, ())
                for position, v in enumerate(block.ops[at].operands)
                if v == value
            )
            if readers and value not in block.outputs:
                if all(reads(*reader, call.trip_count) for reader in readers):
                    found.append(ResidualStack(value, k, slot, inside, readers))
    return tuple(found)
