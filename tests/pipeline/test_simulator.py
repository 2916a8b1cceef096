"""Times of tasks and transfers, against counting ticks."""

from __future__ import annotations

import time

import pytest
from ticks import by_ticks, most_held, random_schedule

from rhino_jax.errors import DeadlockError
from rhino_jax.pipeline.schedules.searched import make
from rhino_jax.pipeline.simulator import simulate
from rhino_jax.pipeline.tasks import TransferLink
from rhino_jax.plan.stages import StageCost
from tests.pipeline.chains import chain


@pytest.mark.parametrize("seed", range(40))
def test_equals_counting_ticks(seed: int) -> None:
    schedule = random_schedule(seed)
    expected = by_ticks(schedule)
    if expected is None:
        with pytest.raises(DeadlockError):
            simulate(schedule)
        return
    found = simulate(schedule)
    assert list(found.task_start_s) == expected[0]
    for mine, theirs in zip(found.transfer_start_s, expected[1], strict=True):
        # What nobody has read when the last task starts may not have set out yet.
        assert theirs is None or mine == theirs


@pytest.mark.parametrize("seed", range(0, 40, 2))
def test_memory_equals_looking_at_every_tick(seed: int) -> None:
    schedule = random_schedule(seed)
    found = simulate(schedule)
    held = most_held(schedule, list(found.task_start_s), list(found.transfer_start_s))
    assert list(found.group_peak_bytes) == held


def test_two_thousand_tasks_take_well_under_a_second() -> None:
    work = chain(
        [StageCost(forward_s=1, backward_s=2)] * 8, 125, link=TransferLink("", 1e9, 0.1)
    )
    schedule = make("1f1b", work)
    assert len(schedule.graph.tasks) == 2000
    start = time.perf_counter()
    simulate(schedule)
    assert time.perf_counter() - start < 0.5


def test_a_link_carries_one_transfer_at_a_time() -> None:
    """Slow links set the pace: m transfers one after another, there and back."""
    work = chain(
        [StageCost(forward_s=1)] * 2, 5, sent_bytes=10, link=TransferLink("", 2.5)
    )
    found = simulate(make("forward-only", work))
    assert found.transfer_start_s == (1, 5, 9, 13, 17)
    assert found.step_time_s == 22
    assert found.exposed_s == (0, 5 * 4 - 4)


def test_transfers_hide_behind_tasks() -> None:
    work = chain(
        [StageCost(forward_s=4)] * 2, 5, sent_bytes=10, link=TransferLink("", 10.0)
    )
    found = simulate(make("forward-only", work))
    assert found.exposed_s == (0, 1)


def test_waiting_for_a_transfer_is_not_waiting_for_a_task() -> None:
    work = chain([StageCost(forward_s=1, backward_s=2)] * 4, 8)
    assert simulate(make("1f1b", work)).exposed_s == (0, 0, 0, 0)


def test_transfers_start_when_they_are_ready() -> None:
    costs = [StageCost(forward_s=1), StageCost(forward_s=5)]
    work = chain(costs, 4, sent_bytes=1, link=TransferLink("", 1.0))
    assert simulate(make("forward-only", work)).transfer_start_s == (1, 2, 3, 4)
