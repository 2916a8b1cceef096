"""Tasks of a step, from what stages cost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rhino_jax.errors import ScheduleError
from rhino_jax.pipeline.graph import graph_of
from rhino_jax.pipeline.schedules.searched import make
from rhino_jax.pipeline.simulator import simulate
from rhino_jax.pipeline.tasks import TaskKind, TransferLink
from rhino_jax.pipeline.work import Chunk, ChunkEdge, StepWork
from rhino_jax.plan.stages import Between, StageCost
from tests.pipeline.chains import chain


COST = StageCost(forward_s=1, backward_s=2, activation_bytes=8)


def test_backward_passes_wait_for_later_stages() -> None:
    graph = graph_of(chain([COST] * 2, 2))
    back = graph.find(TaskKind.BACKWARD, 0, 1)
    waits = {graph.tasks[i].key for i in graph.sources(back)}
    assert waits == {(TaskKind.FORWARD, 0, 1, 0), (TaskKind.BACKWARD, 1, 1, 0)}


def test_weights_gradients_wait_for_inputs_gradients_alone() -> None:
    graph = graph_of(chain([COST] * 2, 2), is_split=True)
    weight = graph.find(TaskKind.WEIGHT_GRADIENT, 1, 0)
    assert list(graph.sources(weight)) == [graph.find(TaskKind.INPUT_GRADIENT, 1, 0)]
    assert not graph.after[weight]


def test_later_slices_read_earlier_ones() -> None:
    graph = graph_of(chain([[COST] * 3] * 2, 1))
    second = graph.find(TaskKind.FORWARD, 0, 0, 1)
    assert graph.tasks[second].after == (graph.find(TaskKind.FORWARD, 0, 0, 0),)
    back = graph.find(TaskKind.BACKWARD, 1, 0, 1)
    assert graph.find(TaskKind.BACKWARD, 1, 0, 2) in graph.tasks[back].after


def test_halves_of_the_backward_pass() -> None:
    assert COST.split_s == (1, 1)
    assert replace(COST, backward_s=1.5, weights_s=0.5).split_s == (1.5, 0.5)
    assert replace(COST, weights_s=1).whole_backward_s == 3
    assert replace(COST, weight_residual_bytes=3).split_bytes == (5, 3)


def test_what_input_gradients_free_is_free_before_the_weights() -> None:
    whole = chain([COST] * 2, 4)
    early = chain([replace(COST, weight_residual_bytes=2)] * 2, 4)
    peaks = [simulate(make("zero-bubble", w)).group_peak_bytes for w in (whole, early)]
    assert peaks[0] == (16, 16)
    assert peaks[1] == (16, 10)


def test_what_updates_take_is_theirs_and_no_micro_batchs() -> None:
    costs = [replace(COST, working_bytes=3, fixed_bytes=10, update_s=1.0)] * 2
    work = replace(chain(costs, 4), has_update=True)
    peaks = simulate(make("1f1b", work)).group_peak_bytes
    assert peaks == (10 + 2 * 8 + 3, 10 + 8 + 3)
    costs = [replace(c, update_bytes=n) for c, n in zip(costs, (9, 15), strict=True)]
    work = replace(chain(costs, 4), has_update=True)
    assert simulate(make("1f1b", work)).group_peak_bytes == (29, 10 + 15)


def test_skips_are_sent_from_where_they_are_made() -> None:
    chunks = tuple(Chunk(g, (StageCost(forward_s=1),)) for g in range(3))
    edges = (
        ChunkEdge(0, 1, (0,), (0,)), ChunkEdge(1, 2, (0,), (0,)), ChunkEdge(0, 2, (50,),
        (0,)),
    )  # fmt: skip
    work = StepWork(
        chunks=chunks,
        edges=edges,
        micro_batches=1,
        links=(TransferLink("far", 10.0),),
        routes={(0, 2): 0},
    )
    assert simulate(make("forward-only", work)).step_time_s == 1 + 5 + 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"micro_batches": 0},
        {"chunks": ()},
        {"chunks": (Chunk(0, (COST,)), Chunk(2, (COST,)))},
        {"chunks": (Chunk(0, (COST,)), Chunk(1, (COST, COST)))},
    ],
)
def test_stages_that_make_no_pipeline_are_refused(wrong: dict) -> None:
    with pytest.raises(ScheduleError, match="fix: "):
        replace(chain([COST] * 2, 2), **wrong)


def coupled(groups: int = 3) -> StepWork:
    """A chain whose groups wait for all forward passes, and read what the last left."""
    work = chain([COST] * groups, 4, link=TransferLink("", latency_s=0.25))
    routes = {**work.routes, (groups - 1, 0): 0}
    between = (Between(0.5, ((groups - 1, 64),)), *[Between()] * (groups - 1))
    return replace(work, routes=routes, between=between)


@pytest.mark.parametrize("name", ["gpipe", "searched"])
def test_backward_passes_wait_for_what_couples_micro_batches(name: str) -> None:
    simulation = simulate(make(name, coupled()))
    tasks = simulation.schedule.graph.tasks
    starts, ends = simulation.task_start_s, simulation.task_end_s
    ahead = [i for i, t in enumerate(tasks) if t.kind is TaskKind.FORWARD]
    kinds = TaskKind.BACKWARD, TaskKind.INPUT_GRADIENT
    back = [i for i, t in enumerate(tasks) if t.kind in kinds]
    between = [i for i, t in enumerate(tasks) if t.kind is TaskKind.BETWEEN]
    assert [tasks[i].seconds for i in between] == [0.5, 0, 0]
    last = max(ends[i] for i in ahead)
    # The first group is sent what it reads; the others go on.
    assert [starts[i] for i in between] == [last + 0.25, last, last]
    assert min(starts[i] for i in back) == last
    assert min(starts[i] for i in back if tasks[i].group == 0) >= last + 0.75


@pytest.mark.parametrize(
    ("name", "v"),
    [("zero-bubble", 1), ("interleaved", 2), ("zero-bubble-v", 2), ("searched", 1)],
)
@pytest.mark.parametrize("count", [3, 6])
def test_other_schedules_wait_too(name: str, v: int, count: int) -> None:
    groups = 3
    work = chain([COST] * (groups * v), count, groups=groups, is_v=name[-1] == "v")
    work = replace(work, between=(Between(0.5),) * groups)
    simulation = simulate(make(name, work))
    tasks = simulation.schedule.graph.tasks
    starts, ends = simulation.task_start_s, simulation.task_end_s
    last = max(
        e for e, t in zip(ends, tasks, strict=True) if t.kind is TaskKind.FORWARD
    )
    passes = (
        TaskKind.BETWEEN,
        TaskKind.BACKWARD,
        TaskKind.INPUT_GRADIENT,
        TaskKind.WEIGHT_GRADIENT,
    )
    late = [s for s, t in zip(starts, tasks, strict=True) if t.kind in passes]
    assert len(late) > groups and min(late) >= last
    usual = simulate(make("gpipe", coupled_equal(groups, count, v)))
    assert simulation.step_time_s <= usual.step_time_s
    if name == "zero-bubble":
        # F = I = W = 1: only first gradients of inputs are waited for.
        assert simulation.step_time_s == 3 * count + (groups - 1) * 2 + 0.5
        assert usual.step_time_s == 3 * count + (groups - 1) * 3 + 0.5


def coupled_equal(groups: int, count: int, v: int) -> StepWork:
    """Stages with all of their work in one chunk."""
    cost = StageCost(forward_s=v, backward_s=2 * v)
    return replace(chain([cost] * groups, count), between=(Between(0.5),) * groups)


@pytest.mark.parametrize("name", ["1f1b", "kfkb"])
def test_coupled_micro_batches_have_no_early_backward_passes(name: str) -> None:
    with pytest.raises(ScheduleError, match="before all forward"):
        make(name, coupled())
