"""Searched schedules: never worse than named ones, and within memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rhino_jax.errors import ScheduleError
from rhino_jax.pipeline.graph import graph_of
from rhino_jax.pipeline.schedules.cpsat import common_unit, reorder
from rhino_jax.pipeline.schedules.listed import (
    PriorityRule,
    bound_s,
    listed,
    ways_to,
    ways_to_end,
)
from rhino_jax.pipeline.schedules.searched import fastest, make, search
from rhino_jax.pipeline.simulator import check_complete, simulate
from rhino_jax.pipeline.tasks import Schedule, TaskKind, TransferLink
from rhino_jax.pipeline.work import StepWork
from rhino_jax.plan.stages import StageCost
from tests.pipeline.chains import chain


def random_work(seed: int) -> StepWork:
    rng = np.random.default_rng(seed)
    stages, m = int(rng.integers(2, 5)), int(rng.integers(2, 7))
    costs = [
        StageCost(
            forward_s=float(rng.integers(1, 6)),
            backward_s=float(2 * rng.integers(1, 6)),
            activation_bytes=int(rng.integers(1, 5)),
        )
        for _ in range(stages)
    ]
    work = chain(
        costs, m, sent_bytes=int(rng.integers(0, 3)), link=TransferLink("", 1.0)
    )
    limits = [2 * c.activation_bytes * stages + 6 for c in costs]
    return replace(work, limit_bytes=tuple(limits))


@pytest.mark.parametrize("seed", range(12))
def test_never_worse_than_the_best_named_one(seed: int) -> None:
    work = random_work(seed)
    found = search(work, samples=4, effort=0.2)
    check_complete(found.schedule)
    named = fastest(work)
    assert found.simulation.step_time_s <= named.step_time_s
    peaks = found.simulation.group_peak_bytes
    assert all(p <= limit for p, limit in zip(peaks, work.limit_bytes, strict=True))
    assert min(t.step_time_s for t in found.tried if t.step_time_s) == (
        found.simulation.step_time_s
    )


def test_better_than_named_ones_where_stages_differ() -> None:
    work = random_work(0)
    found = search(work)
    assert found.is_optimal
    assert found.simulation.step_time_s < 0.9 * fastest(work).step_time_s


def every_order(schedule: Schedule) -> float:
    """The shortest step of all orders of two groups' tasks, by trying all."""
    from itertools import permutations

    best = np.inf
    for first in permutations(schedule.orders[0]):
        for second in permutations(schedule.orders[1]):
            try:
                found = simulate(replace(schedule, orders=(first, second)))
            except ScheduleError:
                continue
            best = min(best, found.step_time_s)
    return float(best)


@pytest.mark.parametrize(("a", "b"), [((3, 1), (1, 4)), ((1, 5), (2, 2))])
def test_cp_sat_equals_trying_all_orders(
    a: tuple[int, int], b: tuple[int, int]
) -> None:
    costs = [StageCost(forward_s=f, backward_s=g) for f, g in (a, b)]
    work = chain(costs, 2, sent_bytes=1, link=TransferLink("", 1.0))
    known = simulate(make("gpipe", work))
    orders, is_optimal = reorder(known)
    assert orders is not None and is_optimal
    found = simulate(Schedule("found", known.schedule.graph, orders)).step_time_s
    assert found == every_order(known.schedule)


def test_cp_sat_keeps_to_memory() -> None:
    """Room for one micro-batch: they run one after another."""
    cost = StageCost(forward_s=1, backward_s=2, activation_bytes=3)
    work = replace(chain([cost] * 2, 3), limit_bytes=(3, 3))
    found = search(work, samples=0)
    assert found.is_optimal
    assert found.simulation.group_peak_bytes == (3, 3)
    # The weights' gradients run beside the other stage, all but the last.
    assert found.simulation.step_time_s < 3 * 6


def test_nothing_fits() -> None:
    cost = StageCost(forward_s=1, backward_s=2, activation_bytes=3)
    with pytest.raises(ScheduleError, match="no schedule fits"):
        search(replace(chain([cost] * 2, 3), limit_bytes=(2, 2)))


def test_same_seed_same_schedule() -> None:
    work = random_work(3)
    first, again = (search(work, effort=0.2).schedule.orders for _ in range(2))
    assert first == again


def test_searched_takes_any_number_of_micro_batches() -> None:
    cost = StageCost(forward_s=1, backward_s=2)
    work = chain([cost] * 8, 6, groups=4)
    assert simulate(make("searched", work, effort=0)).bubble < 3 / (6 + 3)


def test_lists_keep_to_micro_batches_in_flight() -> None:
    cost = StageCost(forward_s=1, backward_s=2, activation_bytes=1)
    work = chain([cost] * 4, 8)
    for limit in ((4, 3, 2, 1), (2, 2, 2, 2)):
        found = simulate(
            listed("mine", graph_of(work), PriorityRule(most_in_flight=limit))
        )
        assert found.group_peak_bytes == (*limit[:3], found.group_peak_bytes[3])
        assert found.group_peak_bytes[3] <= limit[3]


def test_ways_to_the_end() -> None:
    graph = graph_of(chain([StageCost(forward_s=1, backward_s=2)] * 3, 1))
    ways = ways_to_end(graph)
    assert ways[graph.find(TaskKind.FORWARD, 0)] == 9
    assert ways[graph.find(TaskKind.BACKWARD, 0)] == 2
    heads = ways_to(graph)
    assert heads[graph.find(TaskKind.FORWARD, 0)] == 0
    assert heads[graph.find(TaskKind.BACKWARD, 0)] == 7


def test_no_schedule_is_faster_than_the_bound() -> None:
    """Of GPipe with equal tasks the bound is met."""
    work = chain([StageCost(forward_s=1, backward_s=2)] * 3, 4)
    assert bound_s(graph_of(work)) == simulate(make("gpipe", work)).step_time_s
    for seed in range(8):
        made = random_work(seed)
        found = fastest(made)
        assert bound_s(found.schedule.graph) <= found.step_time_s


def test_common_units() -> None:
    assert common_unit([1.0, 2.0, 0.0]) == 1.0
    assert common_unit([1.0, 1.5]) == 0.5
    assert common_unit([1.0, 2**0.5]) is None
