"""Values to recompute are chosen where micro-batches are coupled, too."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers_coupled import STEPS, arguments

import rhino_jax as rhino
from tests.cases import without_reserve


WISHES = {
    "hardware": without_reserve("cpu"),
    "mesh": {"stage": 2},
    "microbatches": 16,
    "schedule": "gpipe",
    "donate_argnums": 0,
}


def many_rows():
    params, batch = arguments()
    rng = np.random.default_rng(0)
    rows = jax.tree.map(
        lambda x: rng.normal(size=(4096, *x.shape[1:])).astype(x.dtype), batch
    )
    return params, rows


@pytest.mark.slow
def test_a_stage_that_does_not_fit_makes_some_values_again():
    step, args = STEPS["balanced"], many_rows()
    plan = rhino.plan(step, *args, **WISHES, memory_budget_bytes="1600KiB")
    pipeline = plan.pipeline
    assert pipeline.between and pipeline.recomputed == ()
    assert pipeline.remat[0].count and pipeline.remat[0].saved_bytes > 0
    assert plan.check(step, *args).ok


@pytest.mark.slow
def test_what_loops_stack_is_made_again_by_price():
    width, layers = 32, 8

    def step(params, x):
        def loss(params):
            def layer(h, w):
                return h + jax.nn.gelu(h @ w), None

            h, _ = jax.lax.scan(layer, x, params["loop"])
            losses = jnp.square(h @ params["out"] - x).mean(-1)
            weights = jax.nn.sigmoid(h[:, 0])
            return jnp.sum(weights * losses) / jnp.sum(weights)

        value, gradients = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    rng = np.random.default_rng(0)

    def normal(*shape):
        return 0.1 * rng.normal(size=shape).astype(np.float32)

    params = {"loop": normal(layers, width, width), "out": normal(width, width)}
    args = params, normal(4096, width)
    plan = rhino.plan(step, *args, **WISHES)
    kept = rhino.plan(step, *args, **WISHES, recompute="as written")
    assert plan.pipeline.between and all(m.count for m in plan.pipeline.remat)
    assert plan.predicted.step_time_s < 0.97 * kept.predicted.step_time_s
    assert plan.check(step, *args).ok
