"""A program cut in time, as plain data."""

from __future__ import annotations

from dataclasses import dataclass, field

from rhino_jax.ir.program import Program


@dataclass(frozen=True, slots=True)
class LoopCrossing:
    """A value at the border of a loop.

    Attributes:
      value: its id in the program.
      how: entering, "whole" or "sliced"; leaving, "sum", "max", "min", "prod", "and"
        or "or" of the pieces, "mean" (of what is each piece's own, by rows), "stacked"
        (each piece has its rows) or "unchanged".
      dim, outer, inner: of what is sliced or stacked, where the batch is: the dim is
        (outer, batch, inner), major first.
    """

    value: int
    how: str
    dim: int = 0
    outer: int = 1
    inner: int = 1

    @property
    def is_added(self) -> bool:
        """Whether what leaves is added up: a mean's pieces have their share already."""
        return self.how in ("sum", "mean")


@dataclass(frozen=True, slots=True)
class MicrobatchLoop:
    """One loop over the pieces.

    Attributes:
      ops: what a piece does, ids in order.
      entering, leaving: what crosses its border.
    """

    ops: tuple[int, ...]
    entering: tuple[LoopCrossing, ...]
    leaving: tuple[LoopCrossing, ...]


@dataclass(frozen=True, slots=True)
class MicrobatchCut:
    """A program cut in time.

    `outside[i]` runs before `loops[i]`, the last of it after all loops. Ops are those
    of the top level and of calls that are taken apart; those of other regions run with
    theirs. An op may run in several places: in more than one loop, and in full as well.

    Attributes:
      rows: size of the batch.
      count: pieces; the last is smaller where they do not divide.
      inputs: value ids of the inputs that hold the batch.
      outside: ids of ops that run in full.
      loops: the loops.
      opened: ids of recomputed regions that are taken apart.
      flops, again_flops, meeting_flops: of the program as it was; of what runs in more
        than one loop, but for its first run; of ops on the whole batch outside loops.
      own: ids of ops that take sums over the batch from each piece's own rows.
      why: of every loop but the first, why it has to wait.
      program: whose ids these are: the one that was given, or, where scans had to be
        split, what it was made into (its inputs and outputs are the same).
    """

    rows: int
    count: int
    inputs: tuple[int, ...]
    outside: tuple[tuple[int, ...], ...]
    loops: tuple[MicrobatchLoop, ...]
    opened: tuple[int, ...]
    flops: float
    again_flops: float
    meeting_flops: float
    own: tuple[int, ...]
    why: tuple[str, ...]
    program: Program = field(repr=False)

    @property
    def pre(self) -> tuple[int, ...]:
        """Ops that run once, before the first loop."""
        return self.outside[0]

    @property
    def post(self) -> tuple[int, ...]:
        """Ops that run once, after the last loop."""
        return self.outside[-1]
