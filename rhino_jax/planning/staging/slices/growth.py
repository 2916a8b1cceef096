"""How the work of ops grows along a sequence: with a slice's tokens, or with these
times those that they attend to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rhino_jax.ir.op import Op
from rhino_jax.ir.program import Program
from rhino_jax.planning.staging.priced import with_regions
from rhino_jax.planning.staging.shapes import Shapes
from rhino_jax.transform.staged.apart import Apart
from rhino_jax.transform.staged.sides import Sides, sides_of
from rhino_jax.transform.token_slices.sliced import sliced


@dataclass(frozen=True, slots=True)
class Growth:
    """Seconds of a part of the model, for a whole sequence.

    Attributes:
      forward_s, backward_s: (of tokens alone, of pairs of tokens); the latter as if all
        tokens were attended to.
    """

    forward_s: tuple[float, float]
    backward_s: tuple[float, float]

    @staticmethod
    def of(both_s: tuple[float, float], before: Any, inside: Any) -> Any:
        """Of a slice.

        Args:
          both_s: of a whole sequence.
          before, inside: tokens ahead of the slice, and in it, as shares of all:
            numbers or arrays.
        """
        return both_s[0] * inside + both_s[1] * inside * (before + inside)


def growths(
    apart: Apart,
    length: int,
    sides: Sides,
    stages: Sequence[int],
    shapes: Shapes,
    group_of: Sequence[int],
) -> list[Growth]:
    """Of every part of the model.

    What grows with pairs of tokens is read off the step in two slices: of it the second
    one does twice as much as the first.

    Args:
      apart: the step; `length`: of its sequences; `sides`: of a micro-batch.
      stages: of every forward equation its part.
      shapes: of the groups, with what ops take.
      group_of: of every part.
    Raises:
      ScheduleError: it cannot run in slices.
    """
    pairs = _shares_of_pairs(apart, length, sides)
    part_of = dict(zip(sides.forward, stages, strict=True))
    took = np.zeros((len(group_of), 2, 2))
    for i, op_id in enumerate(sides.program.body.ops):
        home = sides.homes[i]
        if home is None:
            continue
        part = part_of[home]
        seconds = shapes.seconds[shapes.places[group_of[part]]]
        whole = with_regions(sides.program, seconds, op_id)
        share = pairs.get(i, 0.0)
        side = int(sides.is_backward[i])
        took[part, side] += whole * (1 - share), whole * share
    return [
        Growth((float(f[0]), float(f[1])), (float(b[0]), float(b[1]))) for f, b in took
    ]


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
