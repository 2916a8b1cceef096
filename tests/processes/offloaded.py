"""Scenarios of stages over several processes whose values wait on hosts; see
`worker`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from tests.processes.staged import sums
from tests.processes.worker import patch


WIDTH, ROWS, LAYERS, STEPS = 128, 1024, 8, 2


def deep_step(params: Any, x: Any) -> Any:
    """What its stages leave is most of what they take."""

    def loss(params: Any) -> Any:
        h = x
        for w in params:
            h = jnp.tanh(h @ w)
        return jnp.mean((h - x) ** 2)

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value


def deep_arrays() -> Any:
    rng = np.random.default_rng(0)
    params = [
        rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) / 11 for _ in range(LAYERS)
    ]
    return params, rng.normal(size=(ROWS, WIDTH)).astype(np.float32)


def trained(mesh: Mesh) -> Any:
    """Losses, and what this process has of the state; kinds of memory on the way."""
    import rhino_jax as rhino
    from rhino_jax.hardware.files import load_target
    from rhino_jax.runtime.tasks import controller

    moved, as_it_was = [], controller.moved_to

    def moved_to(arrays: Any, shardings: Any) -> Any:
        found = as_it_was(arrays, shardings)
        moved.extend(x.sharding.memory_kind for x in found)
        return found

    patch.setattr(controller, "moved_to", moved_to)
    options: dict[str, Any] = {
        "mesh": mesh,
        "microbatches": 8,
        "schedule": "gpipe",
        "hardware": load_target("v5e:2x4").replace(
            host_bytes_per_s=1e12, reserve_share=0.0
        ),
        "donate_argnums": 0,
    }
    params, x = deep_arrays()
    free = rhino.plan(deep_step, params, x, **options)
    budget = int(0.5 * free.predicted.peak_bytes)
    step = rhino.auto_shard(deep_step, memory_budget_bytes=budget, **options)
    plan = step.plan(params, x)
    assert plan.pipeline.is_offloaded
    placed, losses = plan.put(params), []
    for _ in range(STEPS):
        placed, loss = step(placed, x)
        losses.append(float(loss))
    return losses, sums(placed), sorted({*moved})


def a_stage_each(i: int) -> Any:
    devices = np.array(jax.devices()).reshape(jax.process_count(), -1)
    return trained(Mesh(devices, ("stage", "data")))


def stages_over_all(i: int) -> Any:
    """Each of two stages has devices of every process."""
    devices = np.array(jax.devices()).reshape(jax.process_count(), -1).T
    return trained(Mesh(devices, ("stage", "data")))
