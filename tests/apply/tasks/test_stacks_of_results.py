"""Stacks of layers over stages, step after step."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import rhino_jax as rhino


LAYERS, WIDTH, ROWS = 4, 8, 16


def train_step(params, x):
    def loss(params):
        h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params["layers"])
        return jnp.mean((h @ params["head"]) ** 2)

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value


def made():
    keys = jax.random.split(jax.random.key(0), 3)
    layers = jax.random.normal(keys[0], (LAYERS, WIDTH, WIDTH))
    head = jax.random.normal(keys[1], (WIDTH, 2))
    return {"layers": layers, "head": head}, jax.random.normal(keys[2], (ROWS, WIDTH))


def test_steps_follow_each_other_and_hold_nothing_of_those_before():
    options = {"stages": 2, "schedule": "1f1b", "microbatches": 4}
    step = rhino.auto_shard(
        train_step, mesh={"stage": 2}, donate_argnums=0, progress=False, **options
    )
    params, x = made()
    wanted = jax.tree.map(jnp.copy, params)
    counts = []
    for i in range(4):
        # In between as a user may have changed it: a new array, that no step made.
        if i == 2:
            params = {**params, "layers": params["layers"] + 0.0}
        before = params["layers"]
        params, value = step(params, x)
        wanted, other = train_step(wanted, x)
        np.testing.assert_allclose(value, other, rtol=1e-5)
        assert before.is_deleted()
        del before
        counts.append(len(jax.live_arrays()))
    assert counts[1] == counts[3]
    for name, found in params.items():
        np.testing.assert_allclose(found, wanted[name], rtol=1e-4, atol=1e-6)
