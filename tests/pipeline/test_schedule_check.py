"""Schedules that cannot run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rhino_jax.errors import DeadlockError, ScheduleError, ScheduleMemoryError
from rhino_jax.pipeline.graph import graph_of
from rhino_jax.pipeline.schedules.searched import make
from rhino_jax.pipeline.simulator import checked
from rhino_jax.pipeline.tasks import Schedule, TransferLink
from rhino_jax.pipeline.work import StepWork
from rhino_jax.plan.stages import StageCost
from tests.pipeline.chains import chain


def work(**others: object) -> StepWork:
    cost = StageCost(forward_s=1, backward_s=2, activation_bytes=10)
    return chain([cost] * 3, 4, **others)  # type: ignore[arg-type]


def test_a_task_that_is_left_out_is_named() -> None:
    schedule = make("1f1b", work())
    orders = (schedule.orders[0][:-1], *schedule.orders[1:])
    with pytest.raises(ScheduleError, match="exactly once") as error:
        checked(replace(schedule, orders=orders))
    assert "backward of micro-batch 3 in chunk 0 (group 0)" in str(error.value)
    assert "it runs 0 times" in str(error.value)
    assert "fix: " in str(error.value)


def test_a_task_that_runs_twice_is_named() -> None:
    schedule = make("1f1b", work())
    orders = (*schedule.orders[:2], (*schedule.orders[2], schedule.orders[2][0]))
    with pytest.raises(ScheduleError, match="it runs 2 times"):
        checked(replace(schedule, orders=orders))


def test_a_task_of_another_group_is_refused() -> None:
    schedule = make("1f1b", work())
    orders = (schedule.orders[1], schedule.orders[0], schedule.orders[2])
    with pytest.raises(ScheduleError, match="not its own"):
        checked(replace(schedule, orders=orders))


def test_a_deadlock_is_shown_as_a_circle() -> None:
    """A stage that wants gradients of a micro-batch that it has not sent on."""
    schedule = make("1f1b", work())
    first = list(schedule.orders[0])
    backward = next(i for i in first if schedule.graph.tasks[i].kind == "backward")
    first.remove(backward)
    with pytest.raises(DeadlockError, match="wait for one another") as error:
        checked(replace(schedule, orders=((backward, *first), *schedule.orders[1:])))
    assert "backward of micro-batch 0 in chunk 0 (group 0) ← " in error.value.where
    assert "forward of micro-batch 0 in chunk 0 (group 0)" in error.value.where
    assert error.value.numbers == "0 of 24 tasks ended"


def test_two_stages_in_opposite_orders_deadlock() -> None:
    base = make("gpipe", work())
    tasks = base.graph.tasks

    def backwards(order: tuple[int, ...]) -> tuple[int, ...]:
        ahead = [i for i in order if tasks[i].kind == "forward"]
        back = [i for i in order if tasks[i].kind == "backward"]
        # The last backward pass before the last forward pass.
        return (*ahead[:-1], back[-1], ahead[-1], *back[:-1])

    orders = (base.orders[0], backwards(base.orders[1]), base.orders[2])
    with pytest.raises(DeadlockError):
        checked(replace(base, orders=orders))


def test_receivers_may_read_in_another_order_than_senders_send() -> None:
    graph = graph_of(
        chain(
            [StageCost(forward_s=1)] * 2, 3, sent_bytes=1, link=TransferLink("", 1.0)
        ),
        is_forward_only=True,
    )
    orders = ((0, 2, 4), (3, 5, 1))
    assert checked(Schedule("mine", graph, orders))


def test_what_does_not_fit_says_which_group() -> None:
    limits = (40, 40, 19)
    assert checked(make("1f1b", work(limit_bytes=limits)))
    with pytest.raises(ScheduleMemoryError, match="group 2") as error:
        make("gpipe", work(limit_bytes=limits))
    assert "40 B of a limit of 19 B" in error.value.numbers
    assert "1f1b" in error.value.fix
