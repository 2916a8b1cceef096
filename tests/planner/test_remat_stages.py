"""Layers under `jax.checkpoint`, whose backward pass is one equation, in stages."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import rhino_jax as rhino
from rhino_jax.frontend.trace import trace
from rhino_jax.models import registry
from rhino_jax.passes.staged.apart import take_apart
from rhino_jax.passes.staged.labels import Labels
from rhino_jax.passes.staged.sides import sides_of
from tests.cases import covering


def t5(layers=4):
    """Return the step of a T5 of so many layers each side, and types of its arguments.

    Of two layers a side, self-attention of the decoder needs none of the encoder's last
    layer: it could be made a stage ahead of that.
    """
    workload = registry.get("t5-tiny", remat=True, num_layers=layers, optimizer="sgd")
    return workload.step, workload.abstract_args()


def short_t5():
    return t5(2)


def small():
    """Return a step of products whose decoder reads its encoder in every layer."""

    def encode(m, w):
        return m + jnp.tanh(m @ w)

    def decode(h, m, w, keys):
        return h + jnp.tanh(h @ w) * (m @ keys)

    def loss(params, x):
        m = h = x
        for w in params["encoder"]:
            m = jax.checkpoint(encode)(m, w)
        for w, keys in params["decoder"]:
            h = jax.checkpoint(decode)(h, m, w, keys)
        return jnp.mean(h**2)

    def step(params, x):
        gradients = jax.grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)

    w = jax.ShapeDtypeStruct((32, 32), jnp.float32)
    params = {"encoder": [w] * 4, "decoder": [(w, w)] * 4}
    return step, (params, jax.ShapeDtypeStruct((16, 32), jnp.float32))


@pytest.mark.parametrize(
    ("model", "stages"),
    covering([(small, 2), (small, 4), (short_t5, 2), (t5, 2), (t5, 4)], 2),
)
def test_backward_passes_are_where_the_cut_has_them(model, stages):
    """Keys of a decoder's cross attention need the encoder alone: they could be made
    stages ahead of the layer that they are of."""
    step, args = model()
    plan = rhino.plan(
        step,
        *args,
        mesh={"stage": stages},
        hardware=f"h100:{stages}",
        microbatches=4,
        schedule="1f1b",
    )
    traced = trace(step, args, {})
    sides = sides_of(take_apart(traced.closed_jaxpr, traced.program, 4, ()))
    stage_of = plan.pipeline.stage_of
    labels = Labels.at(sides, stage_of, tuple(range(stages)))
    place = {op: k for k, op in enumerate(sides.forward)}
    assert any(sides.not_before)
    ops = (sides.program.ops[i] for i in sides.program.body.ops)
    layers = [i for i, op in enumerate(ops) if op.name == "remat2"]
    assert len(layers) >= 4
    for op in layers:
        assert labels.chunk(labels.of[op]) == stage_of[place[sides.homes[op]]]
