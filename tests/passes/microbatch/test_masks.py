"""Masks that do not depend on the batch, in loops over layers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rhino_jax.frontend.trace import trace
from rhino_jax.passes.apply import apply_passes
from rhino_jax.passes.microbatch import cut_in
from tests.passes.interpreter import interpret


ROWS, LENGTH, WIDTH, LAYERS = 12, 8, 4, 3


def train_step(params, x):
    """`jnp.where` broadcasts the mask to the batch; `jax.grad` does so before the loop,
    since the mask is the same in all layers."""

    def layer(h, w):
        scores = jnp.einsum("bid,bjd->bij", h @ w, h)
        mask = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
        weights = jax.nn.softmax(jnp.where(mask, scores, -1e9))
        return h + jnp.einsum("bij,bjd->bid", weights, h), None

    def loss(params):
        h, _ = jax.lax.scan(jax.checkpoint(layer), x, params)
        return jnp.mean(h**2)

    value, gradients = jax.value_and_grad(loss)(params)
    return params - 0.1 * gradients, value


def operands_of_loops(jaxpr):
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan":
            yield from (v.aval.shape for v in eqn.invars)
            yield from operands_of_loops(eqn.params["jaxpr"].jaxpr)


@pytest.mark.parametrize("count", [3, 5])
def test_they_are_made_for_a_micro_batch(count):
    rng = np.random.default_rng(0)
    shapes = (LAYERS, WIDTH, WIDTH), (ROWS, LENGTH, WIDTH)
    args = tuple(rng.normal(size=shape).astype(np.float32) for shape in shapes)
    traced = trace(train_step, args, {})
    mask = (ROWS, LENGTH, LENGTH)
    assert mask in operands_of_loops(traced.closed_jaxpr.jaxpr)
    cut = apply_passes(traced, [cut_in(count)])
    assert mask not in operands_of_loops(cut.closed_jaxpr.jaxpr)
    got, expected = (
        interpret(t.closed_jaxpr, jax.tree.leaves(args)) for t in (cut, traced)
    )
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
