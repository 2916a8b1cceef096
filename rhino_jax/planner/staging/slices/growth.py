"""How the work of ops grows along a sequence: with a slice's tokens, or with these
times those that they attend to."""

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
      forward_s, backward_s: (of tokens alone, of pairs of tokens, of any slice); the
        second as if all tokens were attended to, the last to launch kernels.
    """

    forward_s: tuple[float, float, float]
    backward_s: tuple[float, float, float]

    @staticmethod
    def of(parts_s: tuple[float, float, float], before: Any, inside: Any) -> Any:
        """Of a slice.

        Args:
          parts_s: of a whole sequence.
          before, inside: tokens ahead of the slice, and in it, as shares of all:
            numbers or arrays.
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
    """Of every part of the model.

    What grows with pairs of tokens is read off the step in two slices: of it the second
    one does twice as much as the first.

    Args:
      apart: the step; `length`: of its sequences; `sides`: of a micro-batch.
      stages: of every forward equation its part.
      shapes: of the groups, with what ops take.
      group_of: of every part.
      launch_s: that every kernel takes, however small.
    Raises:
      ScheduleError: it cannot run in slices.
    """
    pairs = _shares_of_pairs(apart, length, sides)
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
    """How many kernels an op is, those of its regions too: ops that take time."""
    op = program.ops[op_id]
    inner = () if op.call is None else op.call.regions
    within = sum(_kernels(program, seconds, o) for region in inner for o in region.ops)
    trips = 1 if op.call is None else op.call.trip_count
    return int(seconds.get(op_id, 0.0) > 0) + trips * within


def _shares_of_pairs(apart: Apart, length: int, sides: Sides) -> Mapping[int, float]:
    """Equation → what of its work for a whole sequence grows with pairs of tokens."""
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
    """
    Args:
      done: in both slices: the first has `half` of the tokens.
    """
    if not all(done):
        return 0.0  # once, for the sequence as a whole
    first, second = half / length, 1 - half / length
    # Of tokens alone, and of pairs: with the second slice all tokens are attended to.
    both = np.array([[first, first**2], [second, second]])
    alone, pairs = np.maximum(np.linalg.solve(both, np.array(done)), 0.0)
    return float(pairs / (alone + pairs)) if alone + pairs else 0.0


def _work(program: Program, op_id: int) -> float:
    """FLOPs, those of regions too; of what has none, bytes that it makes."""

    def flops(op: Op) -> float:
        inner = () if op.call is None else op.call.regions
        total = sum(flops(program.ops[o]) for region in inner for o in region.ops)
        return op.flops + (0 if op.call is None else op.call.trip_count * total)

    op = program.ops[op_id]
    return flops(op) or float(sum(program.values[v].bytes for v in op.results))
