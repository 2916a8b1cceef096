"""Sequence slices that run one after the other (TeraPipe): their number and lengths.

`Growth` is the part of a stage's work that grows with the tokens of a slice, and that
with these times the tokens that they attend to; by it, `Slicing` estimates stages'
costs of every slice, for a few ways to slice.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from rhino_jax.errors import ScheduleError
from rhino_jax.hardware.target import Device
from rhino_jax.passes.sequence_slices.sliced import sequence_length, sliced
from rhino_jax.passes.staged.apart import Apart
from rhino_jax.passes.staged.sides import Sides, sides_of
from rhino_jax.pipeline.cut.ops import CutProblem
from rhino_jax.pipeline.schedules.sequence_slices import TOKEN_SLICES
from rhino_jax.pipeline.tera import slice_sequence
from rhino_jax.pipeline.work import Chunk, ChunkEdge, StepWork
from rhino_jax.plan.stages import StageCost
from rhino_jax.planner.staging.schedules import DISPATCH_S
from rhino_jax.planner.staging.shapes import GroupMeshes, with_regions


COUNTS = (2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Candidate numbers of slices. With m sequences in T slices the bubble is (S - 1) /
(m·T + S - 1): 48 stages and two sequences take 32, as TeraPipe's deepest models do.
More slices make submeshes' programs, and with them planning, longer: the gain required
for that is in `planner.staging.schedules`."""

TILE = 128
"""Tokens of a matmul tile; slices consist of whole tiles, where there are enough."""

MAX_UNITS = 32
"""Number of parts of a sequence that are not split between slices, for few slices: of
4,096 tokens such a part is a tile. For more slices of longer sequences there are up to
four times as many parts as slices."""


@dataclass(frozen=True, slots=True)
class Growth:
    """Seconds of a part of the model, for a whole sequence.

    Attributes:
      forward_s, backward_s: seconds of work per token, of work per pair of tokens, and
        of any slice; the second as if all tokens were attended to, the last to launch
        kernels.
    """

    forward_s: tuple[float, float, float]
    backward_s: tuple[float, float, float]

    @staticmethod
    def of(parts_s: tuple[float, float, float], before: Any, inside: Any) -> Any:
        """Return the seconds of a slice.

        Args:
          parts_s: the seconds of a whole sequence, see `forward_s`.
          before, inside: tokens before the slice, and in it, as shares of all: numbers
            or arrays.
        """
        alone, pairs, fixed = parts_s
        return fixed + alone * inside + pairs * inside * (before + inside)


def _share(done: Sequence[float], half: int, length: int) -> float:
    """Return the share of work that grows with pairs of tokens.

    Args:
      done: the work in both slices.
      half: tokens of the first slice.
      length: tokens of the sequence.
    """
    if not all(done):
        return 0.0  # It runs once, for the whole sequence.
    first, second = half / length, 1 - half / length
    # Columns: work per token, and per pair; the second slice attends to all tokens.
    both = np.array([[first, first**2], [second, second]])
    alone, pairs = np.maximum(np.linalg.solve(both, np.array(done)), 0.0)
    return float(pairs / (alone + pairs)) if alone + pairs else 0.0


@dataclass(frozen=True, eq=False)
class Slicing:
    """A step that is cut into stages, to run in sequence slices.

    Attributes:
      apart: the step.
      sides: passes of a micro-batch.
      shapes: the submeshes.
      problem: the cut problem of the step.
      stages: the stage of each forward op.
      work: the stages' costs of whole sequences.
      device: a device of theirs.
    """

    apart: Apart
    sides: Sides
    shapes: GroupMeshes
    problem: CutProblem
    stages: Sequence[int]
    work: StepWork
    device: Device

    @cached_property
    def length(self) -> int:
        """Number of tokens of a sequence."""
        return sequence_length(self.apart)

    @cached_property
    def sums_s(self) -> list[float]:
        """For each stage, the seconds to accumulate a slice's weight gradients: two
        arrays are read, and one is written."""
        found = [0.0] * self.problem.stages
        for parameter in self.problem.ops.parameters:
            for stage in {self.stages[r] for r in parameter.readers}:
                size = 3 * parameter.gradient_bytes
                found[stage] += size / self.device.hbm_bytes_per_s
        return found

    @cached_property
    def growth(self) -> list[Growth]:
        """The growth of each stage's work along a sequence.

        Work that grows with pairs of tokens is measured on the step in two slices: of
        such work the second slice does twice as much as the first.
        """
        check_length(self.length, 2)
        half, sides = self.length // 2, self.sides
        two = sliced(self.apart, (half, self.length - half))
        program = sides_of(replace(self.apart, piece=two.piece)).program
        done: dict[int, list[float]] = {}
        for op_id, source, at in zip(
            program.body.ops, two.source, two.slice_of, strict=True
        ):
            if source is not None and at is not None:
                op = program.ops[op_id]
                # Its FLOPs; where 0, the bytes of its results.
                made = sum(program.values[v].bytes for v in op.results)
                work = program.flops_of(op) or float(made)
                done.setdefault(source, [0.0, 0.0])[at] += work
        # Equation → share of its work that grows with pairs of tokens.
        pairs = {i: _share(of, half, self.length) for i, of in done.items()}
        part_of = dict(zip(sides.forward, self.stages, strict=True))
        took = np.zeros((len(self.work.chunks), 2, 3))
        for i, op_id in enumerate(sides.program.body.ops):
            home = sides.homes[i]
            if home is None:
                continue
            part = part_of[home]
            places = self.shapes.places[self.work.chunks[part].group]
            seconds = self.shapes.seconds[places]
            whole = with_regions(sides.program, seconds, op_id)
            share = pairs.get(i, 0.0)
            fixed = 0.0
            if i in pairs:
                inside = sides.program.within(sides.program.ops[op_id])
                kernels = sum(n for op, n in inside if seconds.get(op.id, 0.0) > 0)
                fixed = min(whole, self.device.launch_s * kernels)
            rest = whole - fixed
            side = int(sides.is_backward[i])
            took[part, side] += rest * (1 - share), rest * share, fixed

        return [Growth(*map(tuple, of.tolist())) for of in took]

    def ways(self, asked: Sequence[int]) -> Iterator[tuple[tuple[int, ...], StepWork]]:
        """Yield lengths of slices, and the stages' costs of these.

        Args:
          asked: the number of slices; or their lengths; or empty.
        Raises:
          ScheduleError: the step has no backward pass, sequences are shorter than that
            or cannot be sliced.
        """
        if not self.sides.backward:
            raise ScheduleError(
                f"{TOKEN_SLICES!r} is of training steps, and this one has no backward"
                " pass.",
                where="`schedule=`",
                numbers="forward passes alone",
                fix='take schedule="auto": micro-batches pass through the stages one by'
                " one.",
            )
        if len(asked) > 1:
            if sum(asked) != self.length:
                rest = self.length - sum(asked[:-1])
                said = ",".join(map(str, [*asked[:-1], rest]))
                example = said if rest > 0 else "4"
                raise ScheduleError(
                    "lengths of slices do not sum up to that of a sequence.",
                    where="`schedule=`",
                    numbers=f"{' + '.join(map(str, asked))} = {sum(asked)}, sequences"
                    f" of {self.length} tokens",
                    fix=f"let them sum up to {self.length},"
                    f' {"as" if rest > 0 else "or"} "{TOKEN_SLICES}:{example}".',
                )
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
            seconds = sums_s + 2 * DISPATCH_S
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
                fixed_bytes=0 if k else whole.fixed_bytes,
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
