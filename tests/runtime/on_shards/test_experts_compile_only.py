"""Mixtures of experts: compiled programs move what their plans say, on rows' shards."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import rhino_jax as rhino
from tests.verify.extras import skipped_without_extra


pytestmark = [pytest.mark.compile_only, pytest.mark.slow]

TOKENS, WIDTH, HIDDEN, GROUPS, CHOICES = 16384, 1024, 512, 16, 4


def step(p: Any, x: Any, y: Any) -> Any:
    """Return the loss of a layer of experts, and its gradients."""

    def loss(p: Any) -> Any:
        weights, experts = lax.top_k(jax.nn.softmax(x @ p["router"]), CHOICES)
        order = jnp.argsort(experts.reshape(-1))
        sizes = jnp.bincount(experts.reshape(-1), length=GROUPS)
        rows = x[order // CHOICES]
        gate = jax.nn.silu(lax.ragged_dot(rows, p["gate"], sizes))
        gate *= lax.ragged_dot(rows, p["up"], sizes)
        out = lax.ragged_dot(gate, p["down"], sizes)
        out *= weights.reshape(-1)[order][:, None]
        out = jnp.zeros_like(x).at[order // CHOICES].add(out)
        return jnp.mean(jnp.square(out - y).astype(jnp.float32))

    return jax.value_and_grad(loss)(p)


@pytest.mark.parametrize("hardware", ["h100:8", "v5e:2x4"])
def test_rows_stay_on_their_shards(hardware: str) -> None:
    S = jax.ShapeDtypeStruct
    shapes = {
        "router": (WIDTH, GROUPS),
        "gate": (GROUPS, WIDTH, HIDDEN),
        "up": (GROUPS, WIDTH, HIDDEN),
        "down": (GROUPS, HIDDEN, WIDTH),
    }
    params = {k: S(shape, jnp.bfloat16) for k, shape in shapes.items()}
    tokens = S((TOKENS, WIDTH), jnp.bfloat16)
    args = params, tokens, tokens
    plan = rhino.plan(step, *args, mesh={"x": 8}, hardware=hardware, progress=False)
    products = [
        op for op in plan.traced.program.ops if op.name.startswith("ragged_dot")
    ]
    held = [plan.decisions.values[op.operands[0]] for op in products]
    with skipped_without_extra():
        verified = plan.verify(step, *args, compile_for=hardware)
    predicted, compiled = plan.predicted, verified.compiled
    time = compiled.step_time_s / predicted.step_time_s
    peak = compiled.peak_bytes / predicted.peak_bytes
    print(f"{hardware}: compiled over predicted: {time:.2f}, peak {peak:.2f}", held)
    assert verified.ok, verified.table()
    assert all(spec[0] for spec in held)
    assert 0.8 < time < 1.25
    assert 0.8 < peak < 1.25
