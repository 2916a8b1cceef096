"""Layers under `jax.checkpoint` that need sums over the batch, as routers do."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rhino_jax.frontend.trace import trace
from rhino_jax.passes.apply import apply_passes
from rhino_jax.passes.microbatch import cut_in
from rhino_jax.passes.microbatch.cut import MicrobatchChoice
from rhino_jax.passes.microbatch.cutting import MAX_CHANGES, find_cut
from tests.passes.interpreter import interpret


ROWS, WIDTH, EXPERTS = 12, 4, 3


def layer(h, w):
    """With a loss as in Fedus et al. 2021, equation 4: it is not linear in what is
    summed over the batch."""
    h = jnp.tanh(h @ w["first"])
    chosen = jax.nn.softmax(h @ w["router"])
    share = jnp.mean(chosen > 1 / EXPERTS, axis=0)
    return h + jnp.tanh(h @ w["second"]), jnp.sum(share * jnp.mean(chosen, axis=0))


def step_of(layer):
    def train_step(params, x):
        def loss(params):
            h, total = x, 0.0
            for w in params:
                h, balance = layer(h, w)
                total = total + balance
            return jnp.mean(h**2) + 0.1 * total

        value, gradients = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    return train_step


train_step = step_of(jax.checkpoint(layer))


def make(layers):
    shapes = {
        "first": (WIDTH, WIDTH),
        "router": (WIDTH, EXPERTS),
        "second": (WIDTH, WIDTH),
    }
    rng = np.random.default_rng(0)

    def normal(shape):
        return rng.normal(size=shape).astype(np.float32)

    params = [
        {name: normal(shape) for name, shape in shapes.items()} for _ in range(layers)
    ]
    return params, normal((ROWS, WIDTH))


@pytest.mark.parametrize("layers", [2, 3])
def test_sums_are_those_of_the_forward_pass(layers):
    """What runs before micro-batches meet, and again after, is the same as without
    `jax.checkpoint`: the forward pass, not what layers recompute as well."""
    args = make(layers)
    traced, plain = trace(train_step, args, {}), trace(step_of(layer), args, {})
    cut, _ = find_cut(traced.closed_jaxpr, traced.program, MicrobatchChoice(4))
    kept, _ = find_cut(plain.closed_jaxpr, plain.program, MicrobatchChoice(4))
    assert len(cut.loops) == 2
    assert len(cut.opened) == layers
    assert kept.flops < cut.flops
    assert 0 < cut.again_flops <= kept.again_flops
    arrays, again = jax.tree.leaves(args), apply_passes(traced, [cut_in(4)])
    got, expected = (interpret(t.closed_jaxpr, arrays) for t in (again, traced))
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_there_may_be_many_layers():
    layers = MAX_CHANGES + 2
    traced = trace(train_step, make(layers), {})
    cut, _ = find_cut(traced.closed_jaxpr, traced.program, MicrobatchChoice(4))
    assert len(cut.opened) == layers
