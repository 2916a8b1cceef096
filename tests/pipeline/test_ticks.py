"""Stages that are one program, tick by tick."""

from __future__ import annotations

import pytest

from rhino_jax.pipeline.jitter import Noise, jittered
from rhino_jax.pipeline.of_plan import schedule_of
from rhino_jax.pipeline.simulator import simulate
from rhino_jax.pipeline.tasks import TaskKind
from rhino_jax.plan.stages import Between, Pipeline, PipelinePass, StageCost
from rhino_jax.units import format_seconds


COST = StageCost(
    forward_s=2.0,
    backward_s=4.0,
    update_s=5.0,
    activation_bytes=10,
    fixed_bytes=100,
    working_bytes=7,
)
THERE = PipelinePass(tick_s=2.0, send_s=0.5, send_bytes=3, before_s=1.0)
BACK = PipelinePass(
    tick_s=4.0,
    send_s=0.25,
    send_bytes=3,
    before_s=1.5,
    is_backward=True,
    is_reversed=True,
)


def of(*passes: PipelinePass, stages: int = 3, count: int = 6) -> Pipeline:
    return Pipeline(
        micro_batches=count,
        schedule="one-program",
        runs=(),
        costs=(COST,) * stages,
        hops=(),
        between=(Between(sum(p.before_s for p in passes)),) * stages,
        passes=passes,
    )


@pytest.mark.parametrize("stages, count", [(2, 2), (2, 8), (3, 6), (4, 4)])
def test_a_step_is_all_ticks_and_what_is_done_at_once(stages: int, count: int) -> None:
    found = simulate(schedule_of(of(THERE, BACK, stages=stages, count=count)))
    ticks = count + stages - 1
    seconds = 1.0 + ticks * 2.5 + 1.5 + ticks * 4.25 + 5.0
    assert found.step_time_s == pytest.approx(seconds)
    # The last tick of a pass hands on too, and all wait for it.
    busy = 1.0 + 2.0 * count + 1.5 + 4.0 * count + 5.0 + 0.75
    assert found.busy_s == pytest.approx([busy] * stages)
    assert found.bubble == pytest.approx(1 - busy / seconds)
    tasks, starts = found.schedule.graph.tasks, found.task_start_s
    for i, task in enumerate(tasks):
        if task.kind is TaskKind.FORWARD:
            assert starts[i] == pytest.approx(1 + (task.micro_batch + task.group) * 2.5)


def test_backward_passes_go_from_the_last_stage_to_the_first() -> None:
    found = simulate(schedule_of(of(THERE, BACK)))
    tasks, starts = found.schedule.graph.tasks, found.task_start_s
    first = {
        t.group: s
        for t, s in zip(tasks, starts, strict=True)
        if t.kind is TaskKind.BACKWARD and t.micro_batch == 0
    }
    assert first[2] < first[1] < first[0]
    names = {link.name for link in found.schedule.graph.links}
    assert names == {"0 → 1", "1 → 2", "2 → 1", "1 → 0"}


def test_room_for_all_ticks_is_held_from_the_first() -> None:
    found = simulate(schedule_of(of(THERE, BACK)))
    assert found.group_peak_bytes == (100 + 8 * 10 + 7,) * 3
    profile = found.memory[0]
    assert profile.bytes[0] == 100 + 8 * 10 + 7


def test_several_loops_over_layers_are_chunks() -> None:
    """As an encoder's and a decoder's, forward and then back."""
    found = schedule_of(of(THERE, THERE, BACK, BACK))
    order = [found.graph.tasks[i] for i in found.orders[1]]
    met = [t.chunk for t in order if t.micro_batch == 0 and t.kind.is_per_micro_batch]
    assert met == [1, 4, 4, 1]
    forward_only = schedule_of(of(THERE))
    kinds = {t.kind for t in forward_only.graph.tasks}
    assert kinds == {TaskKind.BETWEEN, TaskKind.FORWARD, TaskKind.UPDATE}


def test_a_slow_stage_slows_all() -> None:
    schedule = schedule_of(of(THERE, BACK))
    calm = jittered(schedule, Noise(task_sigma=0.0, link_sigma=0.0, samples=1))
    slow = jittered(
        schedule, Noise(task_sigma=0.0, link_sigma=0.0, slow={1: 2.0}, samples=1)
    )
    assert calm.p50_s == pytest.approx(calm.nominal_s)
    assert slow.p50_s > 1.5 * calm.p50_s


def test_it_is_drawn() -> None:
    found = simulate(schedule_of(of(THERE, BACK)))
    lines = found.table().splitlines()
    assert lines[0].startswith(f"one-program: {format_seconds(61.5)} a step")
    assert [line.split()[0] for line in lines[1:4]] == ["0", "1", "2"]
    assert "F5" in lines[1] and "B5" in lines[1] and "U" in lines[3]
