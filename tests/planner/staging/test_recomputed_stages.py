"""Stages that do not fit make values again in their backward passes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import rhino_jax as rhino
from rhino_jax.plan.stages import KEPT


WIDTH, ROWS, LAYERS = 128, 4096, 24
MESH = {"stage": 2}
HARDWARE = rhino.load_target("h100").replace(reserve_share=0.0)
WISHES = {"mesh": MESH, "microbatches": 4, "hardware": HARDWARE, "schedule": "1f1b"}


def train_step(params, x):
    def loss(params):
        h = x
        for w in params:
            h = jnp.tanh(h @ w)
        return jnp.mean((h - x) ** 2)

    gradients = jax.grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)


def planned(budget=None, **plan_options):
    params = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * LAYERS
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    plan_options = {**WISHES, "memory_budget_bytes": budget, **plan_options}
    return rhino.plan(train_step, params, x, donate_argnums=0, **plan_options)


@pytest.fixture(scope="module")
def free():
    """With room for all, and all kept."""
    plan = planned(recompute="as written")
    assert plan.pipeline.recomputed == ()
    return plan


def test_the_stage_that_does_not_fit_makes_what_is_cheap_again(free, tmp_path):
    plan = planned(int(0.9 * free.predicted.peak_bytes))
    assert plan.pipeline.recomputed == ()
    first, second = plan.pipeline.remat
    assert first.count and second == KEPT
    assert plan.predicted.peak_bytes <= 0.9 * free.predicted.peak_bytes
    ahead, again = free.pipeline.costs[0], plan.pipeline.costs[0]
    saved = ahead.activation_bytes - again.activation_bytes
    assert first.saved_bytes == 2 * saved > 0  # of each micro-batch in flight
    # What only the backward pass reads is made there instead, and written nowhere.
    grown = again.forward_s + again.backward_s - ahead.forward_s - ahead.backward_s
    assert first.added_s == pytest.approx(grown, abs=1e-7)
    assert grown < 0.01 * ahead.backward_s
    rows = [line for line in plan.table().splitlines() if "stage=1 " in line]
    assert [" values: " in row for row in rows] == [True, False]
    assert "recomputed in" in plan.table() and "recomputed in" not in free.table()
    plan.save(tmp_path / "plan.json")
    loaded = rhino.load_plan(tmp_path / "plan.json")
    assert loaded.pipeline == plan.pipeline


@pytest.mark.slow
def test_the_less_memory_the_more_is_made_again(free):
    shares = (0.7, 0.6, 0.55, 0.5)
    plans = [planned(int(s * free.predicted.peak_bytes)) for s in shares]
    saved = [sum(m.saved_bytes for m in plan.pipeline.remat) for plan in plans]
    assert saved == sorted({*saved}), saved
    times = [plan.predicted.step_time_s for plan in plans]
    assert times == sorted(times)
    # With more memory even cuts are not left for uneven ones, where nothing would have
    # to be made again.
    more = planned(int(0.8 * free.predicted.peak_bytes))
    assert more.predicted.step_time_s <= times[0]
    assert all(p.pipeline.recomputed == () for p in plans)


@pytest.mark.parametrize(
    ("plan_options", "told"),
    [
        ({"recompute": "as written"}, 'recompute="auto"'),
        ({"recompute": "none"}, 'recompute="auto"'),
        ({"schedule": "zero-bubble"}, 'schedule="1f1b"'),
    ],
    ids=str,
)
def test_where_nothing_may_be_recomputed_the_plan_is_refused(free, plan_options, told):
    with pytest.raises(rhino.InfeasiblePlanError, match="does not fit") as refused:
        planned(int(0.8 * free.predicted.peak_bytes), **plan_options)
    assert told in refused.value.fix


@pytest.mark.slow
def test_what_does_not_fit_either_is_refused_with_what_was_tried(free):
    with pytest.raises(rhino.InfeasiblePlanError, match="again already") as refused:
        planned(int(0.4 * free.predicted.peak_bytes))
    assert "stage 0" in refused.value.what and "micro-batches" in refused.value.numbers
    # Nothing is tried where one micro-batch alone is too much.
    with pytest.raises(rhino.InfeasiblePlanError, match="does not fit") as refused:
        planned(int(1.1 * free.pipeline.costs[0].fixed_bytes))
    assert "again" not in str(refused.value)


@pytest.mark.slow
def test_no_slower_plan_is_taken_where_more_micro_batches_fit(free):
    budget = int(0.9 * free.predicted.peak_bytes)
    fixed = planned(budget)
    plan = planned(budget, microbatches="auto")
    assert plan.predicted.step_time_s <= fixed.predicted.step_time_s
    assert plan.predicted.peak_bytes <= budget
