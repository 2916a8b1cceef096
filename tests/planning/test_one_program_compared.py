"""Stages as one program beside stages that run as tasks: what is compared, and said."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import rhino_jax as rhino
from rhino_jax.errors import InfeasiblePlanError
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
    clipped,
    planned,
)


@pytest.fixture(scope="module")
def both() -> tuple[Any, Plan, Plan]:
    """The step traced, its plan as tasks, and in one program."""
    step, args = clipped()
    traced = trace(step, args, {}, donate_argnums=(0, 1))
    return traced, planned(step, args, schedule="1f1b"), planned(step, args)


def test_tasks_are_taken_and_a_note_says_what_may_be_faster() -> None:
    step, args = clipped()
    plan = planned(step, args, schedule="auto")
    # Tasks are as short as what it takes to start them.
    assert len(plan.stages) == 2 and not plan.is_one_program
    (note,) = [n for n in plan.notes if n.startswith("schedule='one-program' may be")]
    assert "100 µs to start each" in note
    assert plan.simulate().step_time_s > 0


def test_what_cannot_win_is_not_told(both: tuple[Any, Plan, Plan]) -> None:
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
    assert found is as_tasks
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
    found = or_in_one_program(as_tasks, traced.program, 2, 4, fails)
    assert found.pipeline is as_tasks.pipeline


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
