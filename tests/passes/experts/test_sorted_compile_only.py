"""Tokens sorted by expert on each device, compiled: faster, as predicted."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import rhino_jax as rhino
from rhino_jax.ir.transform import EXPERTS
from tests.verify.extras import skipped_without_extra


pytestmark = [pytest.mark.compile_only, pytest.mark.slow]

WIDTH, HIDDEN, CHOICES = 2048, 512, 8


def layer(p: Any, x: Any) -> Any:
    chances = jax.nn.softmax((x @ p["router"]).astype(jnp.float32))
    weights, experts = lax.top_k(chances, CHOICES)
    order = jnp.argsort(experts.reshape(-1))
    sizes = jnp.bincount(experts.reshape(-1), length=p["up"].shape[0])
    rows = x[order // CHOICES]
    gate = jax.nn.silu(lax.ragged_dot(rows, p["gate"], sizes))
    y = lax.ragged_dot(gate * lax.ragged_dot(rows, p["up"], sizes), p["down"], sizes)
    y *= weights.reshape(-1)[order][:, None].astype(y.dtype)
    return x + jnp.zeros_like(x).at[order // CHOICES].add(y)


def step(params: Any, x: Any, y: Any) -> Any:
    def loss(params: Any) -> Any:
        h = x.reshape(-1, WIDTH)
        for p in params:
            h = layer(p, h)
        return jnp.mean(jnp.square(h - y.reshape(h.shape)).astype(jnp.float32))

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(
        lambda p, g: (p - 0.1 * g).astype(p.dtype), params, grads
    ), value


@pytest.mark.parametrize(
    ("hardware", "experts", "is_taken"),
    [("v5p:2x2x2", 64, True), ("v6e:2x4", 64, True), ("tpu7x:2x2x1", 256, False)],
)
def test_plans_take_what_compiles_faster(
    hardware: str, experts: int, is_taken: bool
) -> None:
    """Two layers of experts of 512, top 8, on 32,768 tokens of 2,048, or on 8,192."""
    S = jax.ShapeDtypeStruct
    p = {
        "router": S((WIDTH, experts), jnp.bfloat16),
        "gate": S((experts, WIDTH, HIDDEN), jnp.bfloat16),
        "up": S((experts, WIDTH, HIDDEN), jnp.bfloat16),
        "down": S((experts, HIDDEN, WIDTH), jnp.bfloat16),
    }
    rows = S((16, 2048) if is_taken else (8, 1024), jnp.bfloat16)
    x = S((*rows.shape, WIDTH), jnp.bfloat16)
    args = [p, p], x, x
    seconds = []
    for grouped in ("as written", "auto") if is_taken else ("auto",):
        plan = rhino.plan(
            step, *args, mesh={"x": 8}, hardware=hardware, grouped=grouped,
            progress=False, donate_argnums=0,
        )  # fmt: skip
        with skipped_without_extra():
            verified = plan.verify(step, *args, compile_for=hardware)
        predicted, compiled = plan.predicted, verified.compiled
        print(
            f"{hardware}, {experts} experts, {grouped}:"
            f" {[t.choice for t in plan.transforms if t.name == EXPERTS]}"
            f" planned {predicted.step_time_s * 1e3:.2f} ms"
            f" {predicted.peak_bytes / 2**30:.2f} GiB,"
            f" compiled {compiled.step_time_s * 1e3:.2f} ms"
            f" {compiled.peak_bytes / 2**30:.2f} GiB"
        )
        assert verified.ok, verified.table()
        seconds.append(compiled.step_time_s)
        for row in plan.variants:
            print(f"  {row.name}: {row.step_time_s * 1e3:.2f} ms")
    taken = [t.name for t in plan.transforms]
    assert (EXPERTS in taken) is is_taken
    assert not is_taken or seconds[1] < 0.9 * seconds[0]
