"""A small train step for stages, and steps run several times and compared."""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tests.runtime.stand_in import normal


D, ROWS = 16, 16
OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-3))


def loss(params, batch):
    x = batch["x"]
    for w in params["layers"]:
        x = x + jnp.tanh(x @ w)
    return jnp.mean((x @ params["head"] - batch["y"]) ** 2)


def train_step(params, state, batch):
    value, gradients = jax.value_and_grad(loss)(params, batch)
    updates, state = OPTIMIZER.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, value


def arguments(layers=4):
    params = {
        "layers": [normal(i, D, D) / 4 for i in range(layers)],
        "head": normal(layers, D, 8) / 4,
    }
    batch = {"x": normal(21, ROWS, D), "y": normal(22, ROWS, 8)}
    return params, OPTIMIZER.init(params), batch


def three_steps(step, params, state, batch):
    losses = []
    for _ in range(3):
        params, state, value = step(params, state, batch)
        losses.append(np.asarray(value))
    return params, state, losses


@cache
def three_steps_of_one_device():
    return three_steps(jax.jit(train_step), *arguments())


def two_steps(step, make, count=1):
    """Return the results of the second of two steps.

    Args:
      make: arguments, of which the first `count` are replaced by as many results.
    """
    mine = make()
    for _ in range(2):
        out = step(*mine)
        mine = (*out[:count], *mine[count:])
    return out


def assert_equal(got, expected):
    """To 1e-4, or far below the largest number of all: some gradients are noise."""
    most = max(float(np.abs(x).max()) for x in jax.tree.leaves(expected))
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True)
    for a, b in pairs:
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6 * most)
