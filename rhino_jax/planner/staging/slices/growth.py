"""Growth of the work of ops along a sequence: with the tokens of a slice, or with these
times the tokens that they attend to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rhino_jax.ir.op import Op
from rhino_jax.ir.program import Program
from rhino_jax.passes.sequence_slices.sliced import sliced
from rhino_jax.passes.staged.apart import Apart
from rhino_jax.passes.staged.sides import Sides, sides_of
from rhino_jax.planner.staging.costs import with_regions
from rhino_jax.planner.staging.shapes import GroupMeshes


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


def growths(
    apart: Apart,
    length: int,
    sides: Sides,
    stages: Sequence[int],
    shapes: GroupMeshes,
    group_of: Sequence[int],
    launch_s: float = 0.0,
) -> list[Growth]:
    """Return the growth of every part of the model.

    Work that grows with pairs of tokens is measured on the step in two slices: of such
    work the second slice does twice as much as the first.

    Args:
      apart: the step.
      length: tokens of its sequences.
      sides: passes of a micro-batch.
      stages: the part of each forward equation.
      shapes: the submeshes, with the seconds of ops on them.
      group_of: the submesh of each part.
      launch_s: seconds that every kernel takes, however small.
    Raises:
      ScheduleError: the step cannot be sliced.
    """
    pairs = _shares_of_pairs(apart, length)
    part_of = dict(zip(sides.forward, stages, strict=True))
    took = np.zeros((len(group_of), 2, 3))
    for i, op_id in enumerate(sides.program.body.ops):
        home = sides.homes[i]
        if home is None:
            continue
        part = part_of[home]
        seconds = shapes.seconds[shapes.places[group_of[part]]]
        whole = with_regions(sides.program, seconds, op_id)
        share = pairs.get(i, 0.0)
        side = int(sides.is_backward[i])
        fixed = 0.0
        if i in pairs:
            fixed = min(whole, launch_s * _kernels(sides.program, seconds, op_id))
        rest = whole - fixed
        took[part, side] += rest * (1 - share), rest * share, fixed

    def parts(of: Any) -> tuple[float, float, float]:
        return float(of[0]), float(of[1]), float(of[2])

    return [Growth(parts(f), parts(b)) for f, b in took]


def _kernels(program: Program, seconds: Mapping[int, float], op_id: int) -> int:
    """Return the number of kernels of an op, with its regions: ops that take time."""
    op = program.ops[op_id]
    inner = () if op.call is None else op.call.regions
    within = sum(_kernels(program, seconds, o) for region in inner for o in region.ops)
    trips = 1 if op.call is None else op.call.trip_count
    return int(seconds.get(op_id, 0.0) > 0) + trips * within


def _shares_of_pairs(apart: Apart, length: int) -> Mapping[int, float]:
    """Return equation → share of its work that grows with pairs of tokens."""
    half = length // 2
    cut = sliced(apart, (half, length - half))
    program = sides_of(replace(apart, piece=cut.piece)).program
    done: dict[int, list[float]] = {}
    for op_id, source, at in zip(
        program.body.ops, cut.source, cut.slice_of, strict=True
    ):
        if source is not None and at is not None:
            done.setdefault(source, [0.0, 0.0])[at] += _work(program, op_id)
    return {i: _share(of, half, length) for i, of in done.items()}


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


def _work(program: Program, op_id: int) -> float:
    """Return an op's FLOPs with its regions; where 0, the bytes of its results."""

    def flops(op: Op) -> float:
        inner = () if op.call is None else op.call.regions
        total = sum(flops(program.ops[o]) for region in inner for o in region.ops)
        return op.flops + (0 if op.call is None else op.call.trip_count * total)

    op = program.ops[op_id]
    return flops(op) or float(sum(program.values[v].bytes for v in op.results))
