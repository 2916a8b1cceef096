"""Stages that do not fit run their forward passes again in their backward passes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import rhino_jax as rhino


WIDTH, ROWS, LAYERS = 128, 4096, 24
MESH = {"stage": 2}
WISHES = {"mesh": MESH, "microbatches": 4, "hardware": "h100", "schedule": "1f1b"}


def train_step(params, x):
    def loss(params):
        h = x
        for w in params:
            h = jnp.tanh(h @ w)
        return jnp.mean((h - x) ** 2)

    gradients = jax.grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)


def planned(budget=None, **wishes):
    params = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * LAYERS
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    wishes = {**WISHES, "memory_budget_bytes": budget, **wishes}
    return rhino.plan(train_step, params, x, donate_argnums=0, **wishes)


@pytest.fixture(scope="module")
def free():
    """With room for all."""
    plan = planned()
    assert plan.pipeline.recomputed == ()
    return plan


def test_the_stage_that_does_not_fit_is_recomputed_alone(free, tmp_path):
    plan = planned(int(0.9 * free.predicted.peak_bytes))
    assert plan.pipeline.recomputed == (0,)
    assert plan.predicted.peak_bytes <= 0.9 * free.predicted.peak_bytes
    ahead, again = free.pipeline.costs[0], plan.pipeline.costs[0]
    assert again.activation_bytes == 0 < ahead.activation_bytes
    assert again.working_bytes > ahead.working_bytes
    # A backward pass is two of the three products, and has one more.
    assert 1.2 < again.backward_s / ahead.backward_s < 2
    assert plan.predicted.step_time_s > free.predicted.step_time_s
    rows = [line for line in plan.table().splitlines() if "stage=1 " in line]
    assert ["forward pass" in row for row in rows] == [True, False]
    assert "runs again" not in free.table()
    plan.save(tmp_path / "plan.json")
    loaded = rhino.load_plan(tmp_path / "plan.json")
    assert loaded.pipeline == plan.pipeline


def test_all_stages_are_recomputed_where_none_fits(free):
    plan = planned(int(0.6 * free.predicted.peak_bytes))
    assert plan.pipeline.recomputed == (0, 1)
    # What the second stage received waits for its backward pass.
    row = 4 * ROWS // 4 * WIDTH
    assert plan.pipeline.costs[1].activation_bytes >= row


@pytest.mark.parametrize(
    ("wishes", "told"),
    [
        ({"recompute": "as written"}, 'recompute="auto"'),
        ({"recompute": "none"}, 'recompute="auto"'),
        ({"schedule": "zero-bubble"}, 'schedule="1f1b"'),
    ],
    ids=str,
)
def test_where_nothing_may_be_recomputed_the_plan_is_refused(free, wishes, told):
    with pytest.raises(rhino.InfeasiblePlanError, match="does not fit") as refused:
        planned(int(0.8 * free.predicted.peak_bytes), **wishes)
    assert told in refused.value.fix


def test_what_does_not_fit_either_is_refused_with_what_was_tried(free):
    with pytest.raises(rhino.InfeasiblePlanError, match="again already") as refused:
        planned(int(0.4 * free.predicted.peak_bytes))
    assert "stage 0" in refused.value.what and "micro-batches" in refused.value.numbers
    # Nothing is tried where one micro-batch alone is too much.
    with pytest.raises(rhino.InfeasiblePlanError, match="does not fit") as refused:
        planned(int(1.1 * free.pipeline.costs[0].fixed_bytes))
    assert "again" not in str(refused.value)


def test_no_slower_plan_is_taken_where_more_micro_batches_fit(free):
    budget = int(0.9 * free.predicted.peak_bytes)
    fixed = planned(budget)
    plan = planned(budget, microbatches="auto")
    assert plan.predicted.step_time_s <= fixed.predicted.step_time_s
    assert plan.predicted.peak_bytes <= budget
