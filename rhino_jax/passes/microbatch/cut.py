"""Options of the micro-batch pass, and the schedule of a program in micro-batches, as
plain data."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from rhino_jax.ir.axes import AxisSpan
from rhino_jax.ir.program import Program
from rhino_jax.utils.codec import to_json


@dataclass(frozen=True, slots=True)
class MicrobatchChoice:
    """Options of the micro-batch pass.

    Attributes:
      count: number of micro-batches.
      most_loops: maximum number of loops over micro-batches; None: any number.
      most_growth: maximum size of all loops together, in ops and in FLOPs, relative to
        the program's: an op runs again in every loop that needs what it computes. Three
        loops are always allowed.
      most_meeting: maximum share of the program's FLOPs that may run on the whole
        batch, outside of loops.
      cheap: functions of the data of up to this many times the bytes of its largest
        array may be computed on the whole batch if that saves a loop (contractions
        never).
      kept: functions of per-row results of earlier loops may be, too, if those results
        take up to this many times those bytes: the maximum of per-row losses, say.
      per_microbatch: places, as `ir.places.at_place` reads them, whose ops take sums
        over the batch from each micro-batch alone: the only option that changes
        results.
      least: minimum number of micro-batches: a step in stages may run as one.
    """

    count: int
    most_loops: int | None = None
    most_growth: float = 3.0
    most_meeting: float = 0.1
    cheap: float = 4.0
    kept: float = 1.0
    per_microbatch: tuple[str, ...] = ()
    least: int = 2

    def text(self) -> str:
        """Return the choice as JSON, which `program_pass.read_choice` parses."""
        return json.dumps(to_json(self), sort_keys=True)


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
        last is smaller (see `emit.Split`).
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
