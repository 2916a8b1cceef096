"""Noise, slow devices, and delays that travel."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from ticks import by_ticks, random_schedule

from rhino_jax.errors import RhinoError, ScheduleError
from rhino_jax.pipeline.jitter import Delay, Noise, jittered, times_with
from rhino_jax.pipeline.schedules.searched import make
from rhino_jax.pipeline.simulator import simulate
from rhino_jax.pipeline.tasks import Schedule, TransferLink
from rhino_jax.plan.stages import StageCost
from tests.pipeline.chains import chain


QUIET = Noise(task_sigma=0.0, link_sigma=0.0, samples=3)


def schedule(name: str = "1f1b", m: int = 8) -> Schedule:
    cost = StageCost(forward_s=1, backward_s=2)
    return make(name, chain([cost] * 4, m, sent_bytes=1, link=TransferLink("", 10.0)))


@pytest.mark.parametrize("seed", range(20))
def test_without_noise_times_are_those_of_the_clock(seed: int) -> None:
    made = random_schedule(seed)
    if by_ticks(made) is None:
        return
    found = simulate(made)
    starts, _ = times_with(found, np.array(made.graph.seconds)[:, None])
    assert starts[:, 0].tolist() == [*found.task_start_s, *found.transfer_start_s]


def test_quantiles_are_in_order_and_above_the_clock() -> None:
    found = jittered(schedule(), Noise(task_sigma=0.2))
    assert found.nominal_s < found.p50_s <= found.p95_s
    assert str(found).startswith("1f1b: 34.6 s by the clock, p50 ")
    assert (jittered(schedule(), QUIET).step_times_s == found.nominal_s).all()


def test_a_table_of_steps_with_noise() -> None:
    found = jittered(schedule(), Noise(task_sigma=0.2))
    lines = found.table().splitlines()
    assert lines[0] == "1f1b, 256 steps with noise"
    assert lines[1].split() == ["by", "the", "clock", "34.6", "s", "1.00x"]
    assert [line.split()[0] for line in lines[4:]] == ["p5", "p50", "p95", "slowest"]
    assert found.p50_s < found.step_time_s < found.step_times_s.max()


@pytest.mark.parametrize(
    "given",
    [
        {"task_sigma": -0.1},
        {"link_sigma": float("nan")},
        {"group_sigma": "0.1"},
        {"slow": {0: float("inf")}},
    ],
    ids=str,
)
def test_noise_that_is_none_is_refused(given: dict) -> None:
    with pytest.raises(ScheduleError, match="finite number") as caught:
        Noise(**given)
    assert next(iter(given)) in caught.value.where


def test_noise_of_what_is_not_there_is_refused() -> None:
    with pytest.raises(RhinoError, match="samples must be a whole number, 1"):
        Noise(samples=0)
    with pytest.raises(ScheduleError, match="group 4 of 4"):
        jittered(schedule(), Noise(slow={4: 2.0}))


def test_the_same_seed_gives_the_same_steps() -> None:
    noise = Noise(samples=16)
    first, again = (jittered(schedule(), noise).step_times_s for _ in range(2))
    assert np.array_equal(first, again)
    other = jittered(schedule(), replace(noise, seed=1)).step_times_s
    assert not np.array_equal(first, other)


def test_factors_leave_averages_as_they_are() -> None:
    """One group alone: its steps are sums, so their mean is the clock's."""
    alone = make("gpipe", chain([StageCost(forward_s=1, backward_s=2)], 16))
    found = jittered(alone, Noise(task_sigma=0.5, samples=4000))
    assert found.step_times_s.mean() == pytest.approx(48, rel=0.02)


def test_a_slow_device_sets_the_pace() -> None:
    found = jittered(schedule(), replace(QUIET, slow={2: 2.0}))
    # Of the other groups one pass each: 3 more and less than 3 + 4 transfers.
    assert found.p50_s == pytest.approx(2 * 24, rel=0.25)
    assert found.p50_s >= 2 * 24


def test_a_delay_of_no_task_is_refused() -> None:
    with pytest.raises(ScheduleError, match="fix: "):
        jittered(schedule(), replace(QUIET, delays=(Delay(0, 16, 1.0),)))


def test_many_steps_are_shown_on_one_line() -> None:
    found = jittered(schedule(), QUIET)
    assert repr(found) == f"Jittered({found}, {QUIET.samples} steps)"
