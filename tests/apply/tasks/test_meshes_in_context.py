"""Steps in stages while the user has set a mesh."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import rhino_jax as rhino


def step(params, key, batch):
    def loss(params):
        x = batch
        for i, w in enumerate(params):
            kept = jax.random.bernoulli(jax.random.fold_in(key, i), 0.9, x.shape)
            x = jnp.tanh(jnp.where(kept, x, 0) @ w)
        return jnp.mean(x**2)

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value


def test_literals_that_were_made_in_the_mesh_run_on_groups():
    """Of `fold_in` JAX asks that key and number are on the same mesh."""
    keys = jax.random.split(jax.random.key(0), 5)
    params = [jax.random.normal(k, (8, 8)) / 3 for k in keys[:4]]
    args = params, jax.random.key(7), jax.random.normal(keys[4], (16, 8))
    expected = jax.jit(step)(*args)
    with jax.set_mesh(jax.make_mesh((2, 2), ("stage", "data"))):
        run = rhino.auto_shard(step, microbatches=4)
        found = run(*args)
    assert len(run.last_plan.stages) == 2
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
