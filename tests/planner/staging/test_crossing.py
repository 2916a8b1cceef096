"""Layouts of the values that cross between stages, where the link between is slow."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import rhino_jax as rhino


WIDTH, ROWS = 1024, 512


def planned(hardware, **plan_options):
    def loss(layers, x):
        for up, down in layers:
            x = x + jax.nn.relu(x @ up) @ down
        return jnp.mean(x.astype(jnp.float32) ** 2)

    def step(layers, x):
        gradients = jax.grad(loss)(layers, x)
        return jax.tree.map(lambda p, g: p - g, layers, gradients)

    def f16(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float16)

    layers = [(f16(WIDTH, 4 * WIDTH), f16(4 * WIDTH, WIDTH))] * 4
    options = {"microbatches": 2, "recompute": "as written", **plan_options}
    return rhino.plan(step, layers, f16(2, ROWS, WIDTH), hardware=hardware, **options)


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_a_gradient_crosses_a_slow_link_in_shards_as_its_activation_does(schedule):
    plan = planned("v100-16gb:2x8", mesh={"stage": 2, "tp": 8}, schedule=schedule)
    (hop,) = plan.pipeline.hops
    # Of one micro-batch, on one of eight devices.
    assert hop.forward_bytes == hop.backward_bytes == 2 * ROWS * WIDTH // 8


@pytest.mark.parametrize(
    ("hardware", "tp", "is_told"), [("v100-16gb:2x8", 8, True), ("h100:8", 4, False)]
)
def test_a_line_says_that_stages_idle_for_their_links(hardware, tp, is_told):
    plan = planned(hardware, mesh={"stage": 2, "tp": tp}, schedule="1f1b")
    assert ("mostly for links between them" in str(plan)) == is_told
    assert ("waits for links" in plan.table()) == is_told
