"""Choice of sequence slices, by the estimated seconds of stages."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from rhino_jax.errors import ScheduleError
from rhino_jax.passes.sequence_slices.sliced import sequence_length
from rhino_jax.passes.staged.apart import Apart
from rhino_jax.passes.staged.sides import Sides
from rhino_jax.pipeline.cut.ops import CutProblem
from rhino_jax.pipeline.schedules.sequence_slices import TOKEN_SLICES
from rhino_jax.pipeline.tera import slice_sequence
from rhino_jax.pipeline.work import Chunk, ChunkEdge, StepWork
from rhino_jax.plan.stages import StageCost
from rhino_jax.planner.staging.shapes import GroupMeshes
from rhino_jax.planner.staging.slices.growth import Growth, growths


COUNTS = (2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Candidate numbers of slices. With m sequences in T slices the bubble is (S - 1) /
(m·T + S - 1): 48 stages and two sequences take 32, as TeraPipe's deepest models do.
More slices make submeshes' programs, and with them planning, longer: the gain required
for that is in `planner.staging.when`."""

TILE = 128
"""Tokens of a matmul tile; slices consist of whole tiles, where there are enough."""

MAX_UNITS = 32
"""Number of parts of a sequence that are not split between slices, for few slices: of
4,096 tokens such a part is a tile. For more slices of longer sequences there are up to
four times as many parts as slices."""


@dataclass(frozen=True, eq=False)
class Slicing:
    """A step that is cut into stages, to run in sequence slices.

    Attributes:
      apart: the step.
      sides: passes of a micro-batch.
      shapes: the submeshes.
      stages: the stage of each forward op.
      work: the stages' costs of whole sequences.
      dispatch_s: seconds that any task takes in addition to its work.
      sums_s: for each stage, seconds to accumulate a slice's weight gradients.
      launch_s: seconds that every kernel takes, however small.
    """

    apart: Apart
    sides: Sides
    shapes: GroupMeshes
    stages: Sequence[int]
    work: StepWork
    dispatch_s: float
    sums_s: Sequence[float]
    launch_s: float = 0.0

    @cached_property
    def length(self) -> int:
        """Number of tokens of a sequence."""
        return sequence_length(self.apart)

    @cached_property
    def growth(self) -> list[Growth]:
        """The growth of each stage's work along a sequence."""
        group_of = [chunk.group for chunk in self.work.chunks]
        check_length(self.length, 2)
        return growths(
            self.apart,
            self.length,
            self.sides,
            self.stages,
            self.shapes,
            group_of,
            self.launch_s,
        )

    def ways(self, asked: Sequence[int]) -> Iterator[tuple[tuple[int, ...], StepWork]]:
        """Yield lengths of slices, and the stages' costs of these.

        Args:
          asked: the number of slices; or their lengths; or empty.
        Raises:
          ScheduleError: the step has no backward pass, sequences are shorter than that
            or cannot be sliced.
        """
        if not self.sides.backward:
            raise _no_backward()
        if len(asked) > 1:
            if sum(asked) != self.length:
                raise _wrong_sum(asked, self.length)
            yield tuple(asked), self.in_slices(asked)
            return
        counts = asked or [n for n in COUNTS if n <= self.length] or (2,)
        check_length(self.length, max(counts))
        for count in counts:
            lengths = self.lengths(count)
            yield lengths, self.in_slices(lengths)

    def lengths(self, count: int) -> tuple[int, ...]:
        """Return the lengths of `count` slices with the shortest step, by the stage
        that is busy longest."""
        units = units_of(self.length, count)
        shares = np.arange(units + 1) / units
        before, inside = shares[:, None], shares[None, :]
        busiest = np.zeros((units + 1, units + 1))
        for growth, sums_s in zip(self.growth, self.sums_s, strict=True):
            seconds = sums_s + 2 * self.dispatch_s
            for both_s in (growth.forward_s, growth.backward_s):
                seconds = seconds + Growth.of(both_s, before, inside)
            busiest = np.maximum(busiest, seconds)
        work = self.work
        found = slice_sequence(busiest, work.groups, work.micro_batches, count)
        ends = np.cumsum([0, *found.lengths]) * self.length // units
        return tuple(np.diff(ends).tolist())

    def in_slices(self, lengths: Sequence[int]) -> StepWork:
        """Return the stages' costs of every slice."""
        ends = np.cumsum([0, *lengths]) / self.length
        shares = [n / self.length for n in lengths]

        def cost(part: int, k: int) -> StageCost:
            whole = self.work.chunks[part].costs[0]
            growth, at = self.growth[part], (ends[k], shares[k])
            return StageCost(
                forward_s=float(Growth.of(growth.forward_s, *at)),
                backward_s=float(Growth.of(growth.backward_s, *at)) + self.sums_s[part],
                activation_bytes=math.ceil(whole.activation_bytes * shares[k]),
                working_bytes=whole.working_bytes,
            )

        def size(of: Sequence[int]) -> tuple[int, ...]:
            return tuple(math.ceil(of[0] * share) for share in shares)

        count = range(len(lengths))
        return replace(
            self.work,
            chunks=tuple(
                Chunk(chunk.group, tuple(cost(part, k) for k in count))
                for part, chunk in enumerate(self.work.chunks)
            ),
            edges=tuple(
                ChunkEdge(
                    e.source, e.target, size(e.forward_bytes), size(e.backward_bytes)
                )
                for e in self.work.edges
            ),
        )


def paced(problem: CutProblem, count: int) -> CutProblem:
    """Return the cut problem of a step in `count` slices: that of `count` times as many
    micro-batches, each smaller in proportion."""
    ops = problem.ops
    return replace(
        problem,
        ops=replace(
            ops,
            ops=tuple(
                replace(
                    op,
                    forward_s=op.forward_s / count,
                    backward_s=op.backward_s / count,
                    activation_bytes=op.activation_bytes // count,
                )
                for op in ops.ops
            ),
            values=tuple(
                replace(
                    v,
                    forward_bytes=v.forward_bytes // count,
                    backward_bytes=v.backward_bytes // count,
                )
                for v in ops.values
            ),
        ),
        micro_batches=problem.micro_batches * count,
        in_flight=(problem.micro_batches * count,) * problem.stages,
    )


def sums_s(
    problem: CutProblem, stages: Sequence[int], bytes_per_s: float
) -> list[float]:
    """Return, for each stage, the seconds to accumulate a slice's weight gradients: two
    arrays are read, and one is written.

    Args:
      problem: the cut problem.
      stages: the stage of each op.
      bytes_per_s: bandwidth of a device's memory.
    """
    found = [0.0] * problem.stages
    for parameter in problem.ops.parameters:
        for stage in {stages[r] for r in parameter.readers}:
            found[stage] += 3 * parameter.gradient_bytes / bytes_per_s
    return found


def units_of(length: int, count: int) -> int:
    """Return the number of parts of a sequence for `count` slices; equal parts, where
    some 16 divide it."""
    most = max(min(length, MAX_UNITS), min(length // TILE, 4 * count), count)
    least = max(count, most // 2)
    return max((n for n in range(least, most + 1) if length % n == 0), default=most)


def check_length(length: int, count: int) -> None:
    """Refuse more slices than a sequence has tokens.

    Raises:
      ScheduleError: it has fewer than `count`.
    """
    if length >= count:
        return
    raise ScheduleError(
        f"sequences are too short for {count} slices.",
        where="`schedule=`",
        numbers=f"sequences of {length} tokens",
        fix=f"take up to {length} slices."
        if length > 1
        else 'take another schedule, as schedule="1f1b".',
    )


def _wrong_sum(lengths: Sequence[int], length: int) -> ScheduleError:
    rest = length - sum(lengths[:-1])
    said = ",".join(map(str, [*lengths[:-1], rest]))
    example = f'as "{TOKEN_SLICES}:{said}"' if rest > 0 else f'or "{TOKEN_SLICES}:4"'
    return ScheduleError(
        "lengths of slices do not sum up to that of a sequence.",
        where="`schedule=`",
        numbers=f"{' + '.join(map(str, lengths))} = {sum(lengths)}, sequences of"
        f" {length} tokens",
        fix=f"let them sum up to {length}, {example}.",
    )


def _no_backward() -> ScheduleError:
    return ScheduleError(
        f"{TOKEN_SLICES!r} is of training steps, and this one has no backward pass.",
        where="`schedule=`",
        numbers="forward passes alone",
        fix='take schedule="auto": micro-batches pass through the stages one by one.',
    )
