"""Pipelines whose sequences run in slices: what a schedule is made of."""

from __future__ import annotations

from dataclasses import replace

from rhino_jax.passes.staged.step import TaskKind
from rhino_jax.pipeline.of_plan import schedule_of
from rhino_jax.pipeline.work import work_of
from rhino_jax.plan.stages import Pipeline, StageCost, StageHop
from rhino_jax.runtime.tasks.controller import order_of
from rhino_jax.utils.codec import from_json, to_json


def cost(forward_s: float, update_s: float = 0.0) -> StageCost:
    return StageCost(
        forward_s=forward_s,
        backward_s=2 * forward_s,
        update_s=update_s,
        activation_bytes=10,
        fixed_bytes=100,
        working_bytes=1,
    )


# Chunks are (slice 0, part 0), (slice 0, part 1), (slice 1, part 0), (slice 1, part 1).
PIPELINE = Pipeline(
    micro_batches=1,
    schedule="token-slices",
    runs=((0, 3), (1, 4)),
    costs=(cost(1, 9), cost(2, 8), cost(3), cost(4)),
    hops=(
        StageHop(0, 1, 5, 6, 1.0, 0.0),
        StageHop(0, 2, 0, 0, 1.0, 0.0),  # keys, within a group
        StageHop(0, 3, 1, 2, 1.0, 0.0),  # read by the later slice alone
        StageHop(2, 3, 7, 8, 1.0, 0.0),
    ),
    group_of=(0, 1, 0, 1),
    slices=(24, 8),
)


def test_costs_and_bytes_are_of_slices() -> None:
    work = work_of(PIPELINE)
    seconds = [[c.forward_s for c in chunk.costs] for chunk in work.chunks]
    assert seconds == [[1, 3], [2, 4]]
    assert [chunk.costs[0].update_s for chunk in work.chunks] == [9, 8]
    assert work.has_update and work.fixed_bytes == (100, 100)
    (edge,) = work.edges
    # Forward with the slice that makes it, back with the one that does then.
    assert edge.forward_bytes == (5 + 1, 7)
    assert edge.backward_bytes == (6, 8 + 2)


def test_tasks_are_dispatched_slice_by_slice() -> None:
    order = order_of(schedule_of(PIPELINE))
    forward = [t.chunk for t in order if t.kind is TaskKind.FORWARD]
    backward = [t.chunk for t in order if t.kind is TaskKind.BACKWARD]
    assert sorted(forward) == sorted(backward) == [0, 1, 2, 3]
    for a, b in ((0, 1), (0, 2), (1, 3), (2, 3)):
        assert forward.index(a) < forward.index(b)
        assert backward.index(b) < backward.index(a)


def test_slices_are_saved() -> None:
    assert from_json(Pipeline, to_json(PIPELINE)) == PIPELINE
    data = to_json(replace(PIPELINE, slices=()))
    data.pop("slices")  # as in plans that were saved before
    assert from_json(Pipeline, data) == replace(PIPELINE, slices=())
