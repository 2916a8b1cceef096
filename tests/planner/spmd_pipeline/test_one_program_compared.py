"""Stages as one program beside stages that run as tasks: what is compared, and said."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import rhino_jax as rhino
from rhino_jax.errors import InfeasiblePlanError
from rhino_jax.frontend.trace import trace
from rhino_jax.plan.plan import PlanData
from rhino_jax.planner.decision import MIN_GAIN, DecisionOptions, NotFaster
from rhino_jax.planner.staging.spmd_pipeline import planned as planned_file
from rhino_jax.planner.staging.spmd_pipeline.planned import (
    Recompute,
    dispatched_s,
    least_s,
    or_in_one_program,
    plan_in_one_program,
    share_of_layers,
)
from tests.planner.spmd_pipeline.helpers_one_program import (
    MESH,
    clipped,
    planned,
    planned_clipped,
)


@dataclass(frozen=True)
class Asked:
    """What is read of a search: the planned function, options, the seconds to beat."""

    running: Any
    options: DecisionOptions
    enough_s: float = math.inf


PlanInOne = Callable[[Any, Any, Callable[[int], float]], PlanData]


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> Callable[..., PlanData]:
    """Return a function that compares tasks with an SPMD pipeline planned as told."""

    def compare(
        as_tasks: PlanData, traced: Any, microbatches: int, plan_in_one: PlanInOne
    ) -> PlanData:
        monkeypatch.setattr(planned_file, "plan_in_one_program", plan_in_one)
        asked: Any = Asked(traced, DecisionOptions(microbatches=microbatches))
        return or_in_one_program(as_tasks, asked, (1, 1))

    return compare


@pytest.fixture(scope="module")
def both() -> tuple[Any, PlanData, PlanData]:
    """The step traced, its plan as tasks, and in one program."""
    step, args = clipped()
    traced = trace(step, args, {}, donate_argnums=(0, 1))
    return traced, planned(step, args, schedule="1f1b"), planned_clipped()


def test_of_short_tasks_one_program_is_taken() -> None:
    step, args = clipped()
    plan = planned(step, args, schedule="auto")
    # Tasks are as short as what it takes to start them.
    assert plan.is_one_program
    (note,) = [n for n in plan.notes if n.startswith("stages are one program: ")]
    assert "of starts, 100 µs each" in note
    assert plan.simulate().step_time_s == pytest.approx(plan.predicted.step_time_s)


def long(as_tasks: PlanData, update_s: float = 0.0) -> PlanData:
    """Of long tasks in equal stages, where one program has the same bubble."""
    pipeline = as_tasks.pipeline
    assert pipeline is not None
    cost = replace(pipeline.costs[0], forward_s=1.0, backward_s=2.0, update_s=update_s)
    pipeline = replace(pipeline, costs=(cost, cost), micro_batches=16, between=())
    return replace(as_tasks, pipeline=pipeline)


def test_what_cannot_win_is_not_planned(
    both: tuple[Any, PlanData, PlanData], compared: Callable[..., PlanData]
) -> None:
    traced, as_tasks, _ = both
    as_tasks = long(as_tasks)

    def planned_it(*_: Any) -> PlanData:
        raise AssertionError("it was planned")

    found = compared(as_tasks, traced, 16, planned_it)
    share = share_of_layers(traced.program, 2)
    assert 0.5 < share < 1
    assert least_s(as_tasks, share, 16) == pytest.approx(48 * (1 + share / 16))
    assert least_s(as_tasks, share, 16) < dispatched_s(as_tasks)
    assert found is as_tasks


def test_what_is_planned_has_to_be_clearly_faster(
    both: tuple[Any, PlanData, PlanData], compared: Callable[..., PlanData]
) -> None:
    traced, as_tasks, in_one = both
    asked: list[tuple[float, float]] = []

    def planned_it(
        search: Any, places: Any, bound_s: Callable[[int], float]
    ) -> PlanData:
        asked.append((search.enough_s, bound_s(4)))
        return in_one

    found = compared(as_tasks, traced, 4, planned_it)
    assert found.is_one_program and "as tasks" in found.notes[-1]
    ((enough_s, bound_s),) = asked
    assert enough_s == pytest.approx((1 - MIN_GAIN) * dispatched_s(as_tasks))
    assert bound_s < enough_s < dispatched_s(as_tasks)

    def slower(*_: Any) -> PlanData:
        raise NotFaster(1.0, 4)

    found = compared(as_tasks, traced, 4, slower)
    assert found.pipeline is as_tasks.pipeline
    assert "one program 1.00 s in 4 micro-batches" in found.notes[-1]


def test_a_plan_that_is_not_enough_says_what_it_takes(
    both: tuple[Any, PlanData, PlanData],
    compared: Callable[..., PlanData],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    traced, as_tasks, _ = both
    plan = planned(*clipped())  # with its search, which others drop
    search = replace(
        plan.origin.solved.stage.search,
        options=DecisionOptions(microbatches=4, recompute="as written"),
    )
    options = replace(search.options, microbatches="auto")
    any_count = replace(search, options=options)
    with pytest.raises(NotFaster) as found:
        plan_in_one_program(replace(search, enough_s=1e-6), (1, 1))
    assert found.value.step_s == pytest.approx(plan.predicted.step_time_s, rel=0.05)
    assert found.value.count == 4
    counts: list[int] = []

    def counted(**asked: Any) -> Recompute:
        counts.append(asked["count"])
        return Recompute(**asked)

    monkeypatch.setattr(planned_file, "Recompute", counted)
    with pytest.raises(NotFaster) as several:
        plan_in_one_program(replace(any_count, enough_s=1e-6), (1, 1))
    # Fewer idle ticks do not make up for that: no other number is planned.
    assert counts == [several.value.count]
    counts.clear()
    plan_in_one_program(any_count, (1, 1))
    assert len(counts) > 1
    with pytest.raises(NotFaster) as none:
        plan_in_one_program(search, (1, 1), lambda count: math.inf)
    assert none.value.step_s == math.inf

    def bound_says_no(*_: Any) -> PlanData:
        raise NotFaster(math.inf)

    found_it = compared(as_tasks, traced, 4, bound_says_no)
    assert found_it is as_tasks


def test_of_tasks_that_do_not_fit_one_program_is_taken(
    both: tuple[Any, PlanData, PlanData], compared: Callable[..., PlanData]
) -> None:
    traced, as_tasks, in_one = both
    error = InfeasiblePlanError("no.", where="here", numbers="1", fix="more")

    def fails(*_: Any) -> PlanData:
        raise InfeasiblePlanError("nor this.", where="here", numbers="2", fix="more")

    found = compared(error, traced, 4, lambda *_: in_one)
    assert found.is_one_program and "as tasks nothing fits" in found.notes[-1]
    with pytest.raises(InfeasiblePlanError, match="no.") as raised:
        compared(error, traced, 4, fails)
    assert raised.value is error
    assert compared(as_tasks, traced, 4, fails) is as_tasks


@pytest.mark.parametrize("count", [3, 5])
def test_what_is_not_uniform_stays_as_it_is(count: int) -> None:
    """Layers that are no loop, that do not divide, or micro-batches that do not."""

    def step(params: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            y = x
            for w in params:
                y = jnp.tanh(y @ w)
            return jnp.mean(y**2)

        return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params))

    args = [jnp.ones((8, 8))] * 4, jnp.ones((16, 8))
    plan = rhino.plan(step, *args, mesh=MESH, microbatches=4, level="fast")
    assert not plan.is_one_program
    assert not any("one program" in note for note in plan.notes)
    program = trace(step, args, {}).program
    assert share_of_layers(program, 2) == 0.0
    of_scan = trace(*clipped(), {}).program
    assert share_of_layers(of_scan, count) == 0.0 < share_of_layers(of_scan, 2)
