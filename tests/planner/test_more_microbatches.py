"""Numbers of micro-batches that are tried where memory is short."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import rhino_jax as rhino


def train_step(params, x):
    def loss(params):
        h = x
        for up, down in params:
            h = h + jnp.tanh(h @ up) @ down
        return jnp.mean(h**2)

    gradients = jax.grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)


def arguments():
    def f32(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    return [(f32(16, 1024), f32(1024, 16))] * 4, f32(4096, 16)


def plan(**options):
    # A group is one device: nothing else than smaller micro-batches saves memory.
    return rhino.plan(
        train_step,
        *arguments(),
        mesh={"stage": 2},
        schedule="1f1b",
        donate_argnums=0,
        **options,
    )


@pytest.mark.slow
def test_more_micro_batches_are_tried_where_none_of_the_first_fits():
    peaks = {m: plan(microbatches=m).predicted.peak_bytes for m in (16, 32)}
    assert peaks[32] < peaks[16]
    assert plan().microbatches <= 16
    found = plan(memory_budget_bytes=sum(peaks.values()) // 2)
    assert found.microbatches == 32
    assert found.predicted.peak_bytes == peaks[32]
