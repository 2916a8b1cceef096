"""A step in stages of one program, and two steps of its plan beside one device."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import rhino_jax as rhino
from tests.passes.spmd_pipeline.helpers_one_program import train_step


MESH = {"stage": 2, "data": 4}


def layer(x: Any, w: Any) -> Any:
    return x + jnp.tanh(x @ w["w"] + w["b"])


@functools.cache
def clipped() -> Any:
    """Return a training step with its layers under `jax.checkpoint`, and arguments."""
    tx = optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1))
    return train_step(jax.checkpoint(layer), tx=tx)


def planned(step: Any, args: Any, mesh: Any = MESH, **options: Any) -> rhino.Plan:
    options = {"schedule": "one-program", "microbatches": 4, "level": "fast", **options}
    return rhino.plan(step, *args, mesh=mesh, donate_argnums=(0, 1), **options)


@functools.cache
def planned_clipped() -> rhino.Plan:
    """Return the plan of `clipped` on `MESH`, which several tests share."""
    return planned(*clipped())


def assert_two_steps_equal(step: Any, args: Any, plan: rhino.Plan) -> None:
    run, single = plan.jit(step), jax.jit(step)
    state, expected, rest = (
        plan.put(jax.tree.map(jnp.copy, args))[:2],
        args[:2],
        args[2:],
    )
    for _ in range(2):
        *state, loss = run(*state, *rest)
        *expected, wanted = single(*expected, *rest)
    for a, b in zip(
        jax.tree.leaves((state, loss)), jax.tree.leaves((expected, wanted)), strict=True
    ):
        a, b = np.asarray(a), np.asarray(b)
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * np.abs(b).max())
