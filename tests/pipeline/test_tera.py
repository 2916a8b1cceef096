"""Unequal slices, against looking at all."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest

from rhino_jax.errors import ScheduleError
from rhino_jax.pipeline.schedules.searched import make
from rhino_jax.pipeline.simulator import simulate
from rhino_jax.pipeline.tera import slice_sequence
from rhino_jax.plan.stages import StageCost
from tests.pipeline.chains import chain


def causal_times(
    units: int, *, fixed_s: float = 0.0, unit_s: float = 0.0, pair_s: float = 0.0
) -> np.ndarray:
    """[units before, units in the slice]: seconds of any slice, for every unit, and for
    each that it attends to."""
    before, inside = np.indices((units + 1, units + 1))
    pairs = before * inside + inside * (inside + 1) / 2
    return fixed_s + unit_s * inside + pair_s * pairs


def every_split(units: int) -> Iterator[tuple[int, ...]]:
    if not units:
        yield ()
    for first in range(1, units + 1):
        for rest in every_split(units - first):
            yield (first, *rest)


def seconds_of(times: np.ndarray, lengths: tuple[int, ...]) -> list[float]:
    starts = np.cumsum([0, *lengths])
    return [float(times[a, n]) for a, n in zip(starts, lengths, strict=False)]


def random_times(seed: int, units: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.integers(1, 30, (units + 1, units + 1)).astype(float)


@pytest.mark.parametrize("seed", range(16))
def test_slices_equal_looking_at_all(seed: int) -> None:
    units, stages = 9, 1 + seed % 6
    times = random_times(seed, units)
    if seed % 2:
        times = causal_times(units, fixed_s=seed, unit_s=7, pair_s=3)
    best = min(
        sum(t) + (stages - 1) * max(t)
        for t in (seconds_of(times, lengths) for lengths in every_split(units))
    )
    found = slice_sequence(times, stages)
    assert found.step_time_s == best
    t = seconds_of(times, found.lengths)
    assert (found.sum_s, found.longest_s) == (sum(t), max(t))


@pytest.mark.parametrize("count", [1, 2, 4, 7])
@pytest.mark.parametrize("seed", range(4))
def test_so_many_slices_equal_looking_at_all(seed: int, count: int) -> None:
    units, stages, repeats = 7, 1 + 2 * seed, 1 + seed % 2
    times = random_times(seed, units)
    best = min(
        repeats * sum(t) + (stages - 1) * max(t)
        for lengths in every_split(units)
        if len(lengths) == count
        for t in [seconds_of(times, lengths)]
    )
    found = slice_sequence(times, stages, repeats, count)
    assert found.step_time_s == best
    assert len(found.lengths) == count
    with pytest.raises(ScheduleError, match="fewer slices"):
        slice_sequence(times, stages, repeats, units + 1)


def test_later_slices_are_no_longer() -> None:
    times = causal_times(64, fixed_s=20, unit_s=1, pair_s=0.1)
    lengths = slice_sequence(times, 24).lengths
    assert sum(lengths) == 64 and len(lengths) > 2
    assert lengths[0] > lengths[-1]


def test_one_stage_is_not_sliced() -> None:
    times = causal_times(16, fixed_s=1, unit_s=1, pair_s=0.1)
    assert slice_sequence(times, 1).lengths == (16,)


def test_unequal_slices_run_as_computed() -> None:
    """Forward passes of unequal slices, alike on all stages, by the simulator."""
    times = causal_times(32, fixed_s=4, unit_s=1, pair_s=0.25)
    found = slice_sequence(times, 6, repeats=2)
    costs = [[StageCost(forward_s=t) for t in 2 * seconds_of(times, found.lengths)]] * 6
    simulated = simulate(make("forward-only", chain(costs, 1)))
    assert simulated.step_time_s == pytest.approx(found.step_time_s)


def test_long_sequences_take_seconds() -> None:
    times = causal_times(128, fixed_s=10, unit_s=1, pair_s=0.01)
    start = time.perf_counter()
    slice_sequence(times, 48)
    assert time.perf_counter() - start < 5
