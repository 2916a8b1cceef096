"""Steps whose batch is one row, apart: all of it is one micro-batch, but the update."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rhino_jax._compat import jaxpr_consts, open_jaxpr
from rhino_jax.frontend.trace import trace
from rhino_jax.passes.staged.apart import take_apart
from tests.cases import covering
from tests.passes.interpreter import interpret
from tests.passes.staged.helpers_staged import entering
from tests.passes.zoo import of_zoo


def check(closed, program, arrays, rtol=1e-5):
    """Check that the parts of a step give what it gives; return them."""
    apart = take_apart(closed, program, 1)
    enters = entering(apart, arrays)
    left = interpret(apart.piece, [np.int32(0), *enters])
    got = interpret(apart.once, [*arrays, *left])[len(enters) :]
    for a, b in zip(interpret(closed, arrays), got, strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-6)
    return apart


def products(closed):
    return str(closed).count(" dot_general[")


MODELS = [
    ("gpt-tiny-unrolled", {"optimizer": "adamw", "clip_norm": 0.5}),
    ("gpt-tiny", {"optimizer": "sgd"}),
    ("llama-tiny", {"optimizer": "adamw"}),
]


@pytest.mark.parametrize(("name", "overrides"), covering(MODELS, 1))
def test_a_long_sequence_is_one_micro_batch(name, overrides):
    traced, arrays = of_zoo(name, batch=1, **overrides)
    apart = check(traced.closed_jaxpr, traced.program, arrays)
    # Forward and backward passes are in it, and nothing but the update is after it.
    assert products(apart.once) == 0
    assert products(apart.piece) == products(traced.closed_jaxpr)
    assert {c.how for c in apart.leaving} == {"sum", "unchanged"}


def test_the_row_may_lose_its_dim():
    """Biases, a loss that the learning rate depends on, and a norm that is returned."""

    def loss(params, batch):
        x = jnp.tanh(batch["x"][0] @ params["w"] + params["b"])
        return jnp.mean((x @ params["w"] - batch["y"].squeeze(0)) ** 2)

    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))

    def step(params, state, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, state = tx.update(grads, state, params)
        updates = jax.tree.map(lambda u: u * jnp.minimum(1.0, value), updates)
        return optax.apply_updates(params, updates), state, optax.tree.norm(grads)

    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=(6, 6)), "b": rng.normal(size=6)}
    batch = {"x": rng.normal(size=(1, 9, 6)), "y": rng.normal(size=(1, 9, 6))}
    params, batch = jax.tree.map(np.float32, (params, batch))
    args = params, tx.init(params), batch
    traced = trace(step, args, {}, donate_argnums=(0, 1))
    closed = traced.closed_jaxpr
    arrays = [*jax.tree.leaves(args), *jaxpr_consts(closed)]
    apart = check(closed, traced.program, arrays)
    assert products(apart.piece) == products(closed) > 0
    left = [v.aval.shape for v in open_jaxpr(apart.piece).outvars]
    assert sorted(left) == [(), (6,), (6, 6)]
