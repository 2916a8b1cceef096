"""Arrays that a user's function keeps in the host's memory."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec as P

import rhino_jax as rhino
from rhino_jax.errors import RhinoError, StageError


WIDTH, LAYERS = 256, 4
HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


def loss_of(params: Any, x: Any) -> Any:
    for w in params:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def by_hand(params: Any, momenta: Any, x: Any) -> Any:
    """A step whose user keeps momenta in the host's memory."""
    gradients = jax.grad(loss_of)(params, x)
    momenta = [
        0.9 * jax.device_put(m, DEVICE) + g
        for m, g in zip(momenta, gradients, strict=True)
    ]
    params = [w - 0.1 * m for w, m in zip(params, momenta, strict=True)]
    return params, [jax.device_put(m, HOST) for m in momenta]


def parameters() -> Any:
    keys = jax.random.split(jax.random.key(0), LAYERS)
    return [jax.random.normal(k, (WIDTH, WIDTH)) / WIDTH**0.5 for k in keys]


def batch() -> Any:
    return np.random.default_rng(0).normal(size=(32, WIDTH)).astype(np.float32)


def hosted(count: int = LAYERS) -> Any:
    """Types of momenta in the host's memory."""
    sharding = NamedSharding(AbstractMesh((), ()), P(), memory_kind="pinned_host")
    leaf = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32, sharding=sharding)
    return [leaf] * count


OPTIONS: dict[str, Any] = {
    "mesh": {"x": 8},
    "hardware": "v5e:2x4",
    "level": "fast",
    "donate_argnums": (0, 1),
    "progress": False,
}


def test_a_user_s_placement_holds() -> None:
    """Momenta come from the host's memory, take none of the devices', and go back."""
    params, x = parameters(), batch()
    plan = rhino.plan(by_hand, params, hosted(), x, **OPTIONS)
    without = rhino.plan(by_hand, params, params, x, **OPTIONS)
    kinds = [s.memory_kind for s in jax.tree.leaves(plan.in_shardings)]
    assert kinds == ["device"] * LAYERS + ["pinned_host"] * LAYERS + ["device"]
    assert plan.predicted.peak_bytes < without.predicted.peak_bytes
    assert plan.predicted.step_time_s > without.predicted.step_time_s
    assert "f32<host>" in str(plan.traced.program)

    sharded = rhino.auto_shard(by_hand, **OPTIONS)
    momenta = jax.device_put(
        [jnp.zeros((WIDTH, WIDTH))] * LAYERS,
        jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host"),
    )
    wanted = jax.jit(by_hand)(params, [jnp.zeros((WIDTH, WIDTH))] * LAYERS, x)
    params, momenta = sharded(params, momenta, x)
    for found, want in zip((*params, *momenta), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(found, want, atol=1e-6)
    assert {m.sharding.memory_kind for m in momenta} == {"pinned_host"}
    sharded(params, momenta, x)
    assert "1 signature" in repr(sharded)


def test_stages_and_code_refuse_what_they_would_move() -> None:
    params, x = parameters(), batch()
    plan = rhino.plan(by_hand, params, hosted(), x, **OPTIONS)
    with pytest.raises(RhinoError, match="host's memory, which no spec says"):
        plan.code("specs")
    with pytest.raises(StageError, match="host's memory") as refused:
        rhino.plan(by_hand, params, hosted(), x, **OPTIONS | {"mesh": None}, stages=2)
    assert refused.value.where == "momenta[0]"
