"""Steps in stages while the user has set a mesh."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from helpers_steps import assert_equal, two_steps

import rhino_jax as rhino
from tests.runtime.stand_in import normal


def step(params, key, batch):
    def loss(params):
        x = batch
        for i, w in enumerate(params):
            kept = jax.random.bernoulli(jax.random.fold_in(key, i), 0.9, x.shape)
            x = jnp.tanh(jnp.where(kept, x, 0) @ w)
        return jnp.mean(x**2)

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value


@pytest.mark.slow
def test_literals_that_were_made_in_the_mesh_run_on_stage_devices():
    """Of `fold_in` JAX asks that key and number are on the same mesh."""

    def made():
        params = [normal(i, 8, 8) / 3 for i in range(2)]
        return params, jax.random.key(7), normal(2, 16, 8)

    expected = two_steps(jax.jit(step), made)
    with jax.set_mesh(jax.make_mesh((2, 2), ("stage", "data"))):
        run = rhino.auto_shard(step, microbatches=4, donate_argnums=0)
        found = two_steps(run, made)
    assert len(run.last_plan.stages) == 2
    assert_equal(found, expected)
