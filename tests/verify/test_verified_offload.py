"""Stages whose values wait in the host's memory, beside their compiled tasks."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import rhino_jax as rhino
from rhino_jax.hardware.files import load_target
from rhino_jax.pipeline.of_plan import schedule_of
from rhino_jax.pipeline.simulator import simulate
from tests.verify.extras import mesh_of_target


NEAR = 1e12
"""Bytes per second of a host that is so near that values wait there."""


def train_step(params, x):
    def loss(params):
        h = x
        for w in params:
            h = jnp.tanh(h @ w)
        return jnp.mean((h - x) ** 2)

    gradients = jax.grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)


def arguments(width, rows, layers):
    params = [jax.ShapeDtypeStruct((width, width), jnp.float32)] * layers
    return params, jax.ShapeDtypeStruct((rows, width), jnp.float32)


def planned(args, hardware, mesh, share, schedule):
    """Plans with room for all, all kept, and with a share of the memory of this one."""
    options = {
        "mesh": mesh,
        "microbatches": 8,
        "schedule": schedule,
        "hardware": load_target(hardware).replace(
            host_bytes_per_s=NEAR, reserve_share=0.0
        ),
        "donate_argnums": 0,
    }
    free = rhino.plan(train_step, *args, recompute="as written", **options)
    budget = int(share * free.predicted.peak_bytes)
    plan = rhino.plan(train_step, *args, memory_budget_bytes=budget, **options)
    assert plan.pipeline.is_offloaded and not free.pipeline.is_offloaded
    return free, plan


def test_compiled_stages_hold_what_was_predicted_within_a_tenth():
    args = arguments(64, 1024, 8)
    free, plan = planned(args, "cpu", {"stage": 2}, 0.4, "gpipe")
    before, after = (p.verify(train_step, *args) for p in (free, plan))
    assert after.compiled.peak_bytes < 0.45 * before.compiled.peak_bytes
    predicted = simulate(schedule_of(plan.pipeline)).group_peak_bytes
    assert predicted == pytest.approx(after.stage_peak_bytes, rel=0.1)
    assert max(predicted) <= plan.memory_budget_bytes


@pytest.mark.slow
@pytest.mark.compile_only
@pytest.mark.parametrize("hardware", ["v5e:2x4", "h100:8"])
def test_compiled_for_hardware_that_is_not_here_they_save_what_was_predicted(hardware):
    mesh_of_target(hardware)
    args = arguments(512, 16384, 8)
    mesh = {"stage": 2, "data": 4}
    predicted, compiled = [], []
    for plan in planned(args, hardware, mesh, 0.4, "gpipe"):
        found = plan.verify(train_step, *args, compile_for=hardware)
        assert found.out_of_memory is None
        predicted.append(simulate(schedule_of(plan.pipeline)).group_peak_bytes)
        compiled.append(found.stage_peak_bytes)
    # Compilers keep copies of weights that are not predicted, of both plans alike.
    saved = [
        [before - after for before, after in zip(*peaks, strict=True)]
        for peaks in (predicted, compiled)
    ]
    assert saved[0] == pytest.approx(saved[1], rel=0.1)
    assert max(compiled[1]) < 0.45 * max(compiled[0])
