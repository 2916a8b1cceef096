"""Stages as one program beside stages that run as tasks: what is compared, and said."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import rhino_jax as rhino
from rhino_jax import models
from rhino_jax.errors import InfeasiblePlanError, StageError
from rhino_jax.frontend.trace import trace
from rhino_jax.plan.plan import Plan
from rhino_jax.planning.staging.one_program.compared import (
    dispatched_s,
    least_s,
    or_in_one_program,
    share_of_layers,
)
from tests.planning.helpers_one_program import (
    MESH,
    assert_two_steps_equal,
    clipped,
    planned,
)


@pytest.fixture(scope="module")
def both() -> tuple[Any, Plan, Plan]:
    """The step traced, its plan as tasks, and in one program."""
    step, args = clipped()
    traced = trace(step, args, {}, donate_argnums=(0, 1))
    return traced, planned(step, args, schedule="1f1b"), planned(step, args)


def test_the_faster_is_taken_and_both_are_listed() -> None:
    step, args = clipped()
    plan = planned(step, args, schedule="auto")
    # Tasks are as short as what it takes to start them.
    assert plan.schedule == "one-program"
    (note,) = [n for n in plan.notes if n.startswith("stages by predicted step")]
    assert "tasks by" in note and note.endswith("taken: one program.")
    names = [v.name for v in plan.variants]
    assert any(n.startswith("one-program, 4 micro-batches") for n in names)
    assert any(not n.startswith("one-program") for n in names)
    (chosen,) = [v for v in plan.variants if v.is_chosen]
    assert chosen.step_time_s == pytest.approx(plan.predicted.step_time_s)
    assert_two_steps_equal(step, args, plan)


def scaled(plan: Plan, factor: float) -> Plan:
    """A plan that is predicted to take another time."""
    step_s = factor * plan.predicted.step_time_s
    return replace(plan, predicted=replace(plan.predicted, step_time_s=step_s))


@pytest.mark.parametrize("factor, is_taken", [(0.5, True), (0.97, False), (2, False)])
def test_one_program_is_taken_where_it_is_clearly_faster(
    both: tuple[Any, Plan, Plan], factor: float, is_taken: bool
) -> None:
    traced, as_tasks, in_one = both
    tasks_s = dispatched_s(as_tasks)
    assert tasks_s > as_tasks.predicted.step_time_s
    in_one = scaled(in_one, factor * tasks_s / in_one.predicted.step_time_s)
    found = or_in_one_program(as_tasks, traced.program, 2, 4, lambda: in_one)
    assert found.is_one_program == is_taken
    assert "taken: " + ("one program" if is_taken else "tasks") in found.notes[-1]
    assert [v.is_chosen for v in found.variants].count(True) == 1


def test_what_cannot_win_is_not_planned(both: tuple[Any, Plan, Plan]) -> None:
    traced, as_tasks, _ = both
    pipeline = as_tasks.pipeline
    assert pipeline is not None
    # Long tasks, of equal stages: one program has the same bubble.
    cost = replace(pipeline.costs[0], forward_s=1.0, backward_s=2.0, update_s=0.0)
    pipeline = replace(pipeline, costs=(cost, cost), micro_batches=8)
    as_tasks = replace(as_tasks, pipeline=pipeline)

    def planned_it() -> Plan:
        raise AssertionError("it was planned")

    found = or_in_one_program(as_tasks, traced.program, 2, 8, planned_it)
    assert found.pipeline is pipeline
    assert found.notes[-1].startswith("one program was not planned: at least 2")
    share = share_of_layers(traced.program, 2)
    assert 0.5 < share < 1
    assert least_s(as_tasks, share, 8) == pytest.approx(24 * (1 + share / 8))
    assert least_s(as_tasks, share, 8) < dispatched_s(as_tasks)


def test_of_tasks_that_do_not_fit_one_program_is_taken(
    both: tuple[Any, Plan, Plan],
) -> None:
    traced, as_tasks, in_one = both
    error = InfeasiblePlanError("no.", where="here", numbers="1", fix="more")

    def fails() -> Plan:
        raise InfeasiblePlanError("nor this.", where="here", numbers="2", fix="more")

    found = or_in_one_program(error, traced.program, 2, 4, lambda: in_one)
    assert found.is_one_program and "as tasks nothing fits" in found.notes[-1]
    with pytest.raises(InfeasiblePlanError, match="no.") as raised:
        or_in_one_program(error, traced.program, 2, 4, fails)
    assert raised.value is error
    assert or_in_one_program(as_tasks, traced.program, 2, 4, fails) == as_tasks


def test_what_one_program_refuses_is_told_where_that_is_short(
    both: tuple[Any, Plan, Plan],
) -> None:
    traced, as_tasks, _ = both

    def refuses(words: str) -> Plan:
        def plan() -> Plan:
            raise StageError(words, where="here", numbers="1", fix="that")

        return or_in_one_program(as_tasks, traced.program, 2, 4, plan)

    assert refuses("it is odd.").notes[-1] == "not in one program: it is odd."
    assert refuses("word " * 30).notes == as_tasks.notes


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


def test_it_is_taken_for_a_model_whose_head_one_stage_would_have() -> None:
    workload = models.get("gpt-small", layers="scan", num_layers=4)
    args = jax.eval_shape(lambda: workload.make_args(jax.random.key(0)))
    options = {"hardware": "h100:8", "microbatches": 4}
    plan = planned(workload.step, args, schedule="auto", **options)
    tasks = planned(workload.step, args, schedule="1f1b", **options)
    assert plan.is_one_program
    assert plan.predicted.step_time_s < 0.95 * tasks.predicted.step_time_s
