"""Steps in a row drift apart where nothing holds them together."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rhino_jax.pipeline.check import checked
from rhino_jax.pipeline.jitter import Delay, wave
from rhino_jax.pipeline.repeat import repeated
from rhino_jax.pipeline.schedules.table import make
from rhino_jax.pipeline.simulator import simulate
from rhino_jax.pipeline.tasks import Link, Schedule
from rhino_jax.pipeline.work import Cost, Work, chain


def work(coupling_bytes: int = 0) -> Work:
    base = chain([Cost(forward_s=1, backward_s=2, activation_bytes=1)] * 4, 6)
    pairs = [(a, b) for a in range(4) for b in range(4) if abs(a - b) > 1]
    return replace(
        base,
        update_s=(1.0, 1.0, 1.0, 5.0),
        coupling_bytes=coupling_bytes,
        links=(Link("far"),) * len(pairs),
        routes={pair: i for i, pair in enumerate(pairs)},
    )


def steps(count: int, coupling_bytes: int = 0) -> Schedule:
    return repeated(make("1f1b", work(coupling_bytes)), count)


def test_one_step_is_as_before() -> None:
    assert repeated(make("1f1b", work()), 1) == make("1f1b", work())


def test_every_task_of_every_step_runs_once() -> None:
    schedule = checked(steps(3))
    assert len(schedule.graph.by_key) == 3 * len(make("1f1b", work()).graph.tasks)


def test_updates_of_later_stages_hide_unless_they_wait_for_others() -> None:
    one = simulate(steps(1)).step_time_s
    assert one == 9 * 3 + 1
    assert simulate(steps(4)).step_time_s == 4 * one
    # Of 5 seconds, 3 hide behind the next step's way to the last stage.
    assert simulate(steps(4, coupling_bytes=8)).step_time_s == 4 * (27 + 2) + 3


def test_a_delay_travels_on_into_later_steps() -> None:
    found = wave(steps(3, coupling_bytes=8), Delay(2, 0, 5.0))
    assert found.growth_s == pytest.approx(5.0)
    assert found.largest_lag_s == pytest.approx((5.0,) * 4)
