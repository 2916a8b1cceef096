"""The schedule of a program in micro-batches, as plain data."""

from __future__ import annotations

from dataclasses import dataclass, field

from rhino_jax.ir.axes import AxisSpan
from rhino_jax.ir.program import Program


NO_SPAN = AxisSpan(0, 1)
"""Span of values that loops read or return in full."""


@dataclass(frozen=True, slots=True)
class LoopCrossing:
    """A value that enters or leaves a loop over micro-batches.

    Attributes:
      value: its id in the program.
      how: for a value that enters, "whole" or "sliced"; for one that leaves, the
        reduction over micro-batches ("sum", "max", "min", "prod", "and", "or"), "mean"
        (of per-micro-batch values, weighted by rows), "stacked" (each micro-batch has
        its rows) or "unchanged".
      span: the dim of a sliced or stacked value that holds the batch.
    """

    value: int
    how: str
    span: AxisSpan = NO_SPAN

    @property
    def is_added(self) -> bool:
        """Whether micro-batches are added up: those of a mean are weighted already."""
        return self.how in ("sum", "mean")


@dataclass(frozen=True, slots=True)
class MicrobatchLoop:
    """One loop over micro-batches.

    Attributes:
      ops: ids of the ops that run on each micro-batch, in order.
      entering: values that the loop reads.
      leaving: values that the loop returns.
    """

    ops: tuple[int, ...]
    entering: tuple[LoopCrossing, ...]
    leaving: tuple[LoopCrossing, ...]


@dataclass(frozen=True, slots=True)
class MicrobatchCut:
    """The schedule of a program in micro-batches: which ops run in which loop.

    `outside[i]` runs before `loops[i]`, the last entry after all loops. Ops are those
    of the top level and of inlined calls; ops of other regions run with their region.
    An op may be scheduled several times: in more than one loop, and on the whole batch
    as well.

    Attributes:
      rows: size of the batch.
      count: number of micro-batches that run; where it does not divide `rows`, the
        last is smaller (see `emit.pieces.Split`).
      inputs: value ids of the inputs that hold the batch.
      outside: ids of the ops that run on the whole batch, by position between loops.
      loops: the loops.
      opened: ids of the `jax.checkpoint` regions that are inlined.
      flops: FLOPs of the original program.
      again_flops: FLOPs of ops that run in more than one loop, without their first run.
      meeting_flops: FLOPs of ops that run on the whole batch outside of loops.
      own: ids of ops that take sums over the batch from each micro-batch alone.
      why: for each loop but the first, the reason that it must wait for the one before.
      places: ops that read sums over the batch because of which loops wait, in the form
        of `per_microbatch=`.
      program: the program that ids refer to: the given one or, where scans had to be
        split, the rewritten one (with the same inputs and outputs).
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
    places: tuple[str, ...]
    program: Program = field(repr=False)

    @property
    def pre(self) -> tuple[int, ...]:
        """Ids of the ops that run once, before the first loop."""
        return self.outside[0]

    @property
    def post(self) -> tuple[int, ...]:
        """Ids of the ops that run once, after the last loop."""
        return self.outside[-1]
