"""Which lines of a block run late: those of the backward pass, and all after it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from rhino_jax.passes.remat.regions import FlatRegion


@dataclass(frozen=True, slots=True, eq=False)
class Halves:
    """A block, early and late.

    Attributes:
      block: it.
      is_late: [lines], whether reverse differentiation made the line, or it needs what
        such a line made.
      late_uses: value made early → positions of the late lines that read it.
      bound: values that live to the end of the block, whatever is chosen.
    """

    block: FlatRegion
    is_late: tuple[bool, ...]
    late_uses: dict[int, tuple[int, ...]]
    bound: frozenset[int]

    def is_early(self, value: int) -> bool:
        """Whether a line that is not late makes it."""
        line = self.block.maker.get(value)
        return line is not None and not self.is_late[line]


def halves_of(block: FlatRegion) -> Halves:
    """What is early and what is late in a block; nothing is early where all is late."""
    return with_late(block, _late_lines(block))


def with_late(block: FlatRegion, is_late: Sequence[bool]) -> Halves:
    """A block of which it is known which lines are late."""
    uses: dict[int, list[int]] = defaultdict(list)
    for k, line in enumerate(block.lines):
        if is_late[k]:
            for v in dict.fromkeys(line.reads):
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
    for line in block.lines:
        is_late.append(
            line.op.source.is_backward or any(v in late_values for v in line.reads)
        )
        if is_late[-1]:
            late_values.update(line.makes)
    if True not in is_late:
        return is_late
    # What follows the first gradient and is for late lines alone, as an optimizer's
    # decay of a momentum, can wait until these run.
    early_needs, start = set(block.outputs), is_late.index(True)
    for k in reversed(range(len(block.lines))):
        line = block.lines[k]
        if not is_late[k] and k > start:
            is_late[k] = bool(line.makes) and early_needs.isdisjoint(line.makes)
        if not is_late[k]:
            early_needs.update(line.reads)
    return is_late
