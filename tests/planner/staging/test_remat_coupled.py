"""Values to recompute are chosen where micro-batches are coupled, too."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rhino_jax as rhino
from tests.cases import without_reserve


WISHES = {
    "hardware": without_reserve("cpu"),
    "mesh": {"stage": 2},
    "microbatches": 16,
    "schedule": "gpipe",
    "donate_argnums": 0,
}


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
