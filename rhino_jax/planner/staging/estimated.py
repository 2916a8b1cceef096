"""Estimated costs of the chunks of a cut step, before any submesh is planned."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import replace

from rhino_jax.passes.staged.labels import Labels
from rhino_jax.passes.staged.sides import Sides
from rhino_jax.pipeline.cut.ops import CutProblem, StageCut
from rhino_jax.pipeline.work import StepWork, as_work
from rhino_jax.plan.stages import Between, StageCost
from rhino_jax.planner.staging.costs import with_regions
from rhino_jax.planner.staging.shapes import GroupMeshes


def estimated(
    problem: CutProblem,
    chosen: StageCut,
    sides: Sides,
    shapes: GroupMeshes,
    group_of: Sequence[int],
) -> StepWork:
    """Return the estimated work of all chunks, with backward passes whole and split.

    Args:
      problem, chosen: the cut problem and its cut, one chunk for each of its stages.
      sides: passes of a micro-batch, with the loops of its backward pass split in two
        where schedules split it.
      shapes: the submeshes, with the seconds of ops on them.
      group_of: submesh of each chunk.
    """
    work = as_work(problem, chosen, group_of)
    labels = Labels.at(sides, chosen.stages, group_of, is_split=True)
    took = [0.0] * labels.count
    devices = shapes.devices(0)  # The problem's bytes are of these devices too.
    for label, op_id in zip(labels.of, sides.program.body.ops, strict=True):
        if label is not None:
            seconds = shapes.seconds[shapes.places[labels.group(label)]]
            took[label] += with_regions(sides.program, seconds, op_id)
    chunks = tuple(
        replace(chunk, costs=(_cost(labels, c, took, devices, chunk.costs[0]),))
        for c, chunk in enumerate(work.chunks)
    )
    work = replace(work, chunks=chunks)
    # The cost between the passes is the same in all candidate schedules, so it is 0.
    between = (Between(),) * work.groups if sides.is_coupled else ()
    return replace(work, between=between)


def twice(
    work: StepWork, sides: Sides, shapes: GroupMeshes, chosen: StageCut
) -> StepWork:
    """Return the work in which values that couple micro-batches are computed ahead of
    all forward passes."""
    took = [0.0] * len(work.chunks)
    labels = Labels.at(sides, chosen.stages, [chunk.group for chunk in work.chunks])
    for i in sides.ahead:
        label = labels.of[i]
        if label is not None:
            seconds = shapes.seconds[shapes.places[labels.group(label)]]
            op = sides.program.body.ops[i]
            took[label] += with_regions(sides.program, seconds, op)
    chunks = tuple(
        replace(chunk, costs=(replace(chunk.costs[0], ahead_s=s),))
        for chunk, s in zip(work.chunks, took, strict=True)
    )
    # Ahead tasks send at most what forward passes do.
    edges = tuple(replace(edge, ahead_bytes=edge.forward_bytes) for edge in work.edges)
    return replace(work, chunks=chunks, edges=edges, is_twice=True)


def _cost(
    labels: Labels, chunk: int, took: Sequence[float], devices: int, whole: StageCost
) -> StageCost:
    if not labels.is_split:
        return whole
    count, lines, made = labels.chunks, labels.lines, labels.made_at
    back, late = 2 * count - 1 - chunk, 3 * count - 1 - chunk
    ahead = {v for v, at in made.items() if at == chunk} | labels.reads[chunk]
    left = ahead & (labels.reads[back] | labels.reads[late]) & made.keys()
    handed = (labels.reads[late] & made.keys()) - ahead

    def size(values: Set[int]) -> int:
        return sum(lines.bytes(v) for v in values) // devices

    return replace(
        whole,
        backward_s=took[back],
        weights_s=took[late],
        activation_bytes=size(left),
        weight_residual_bytes=size(left & labels.reads[late]),
        output_gradient_bytes=size(handed),
    )
