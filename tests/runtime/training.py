"""A small train step with optimizer state, and what it gives on one device."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.runtime.stand_in import normal


def train_step(params: Any, opt_state: Any, batch: Any) -> Any:
    def loss_of(p: Any) -> Any:
        hidden = jax.nn.relu(batch["x"] @ p["w1"] + p["b1"])
        return jnp.mean((hidden @ p["w2"] - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(params)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, opt_state["m"], grads)
    params = jax.tree.map(lambda p, m: p - 0.1 * m, params, momentum)
    return params, {"m": momentum, "step": opt_state["step"] + 1}, loss


def state() -> tuple[Any, Any, Any]:
    params = {
        "w1": normal(0, 16, 32) * 0.2,
        "b1": jnp.zeros(32),
        "w2": normal(1, 32, 8) * 0.2,
    }
    opt = {"m": jax.tree.map(jnp.zeros_like, params), "step": jnp.int32(0)}
    batch = {"x": np.asarray(normal(2, 64, 16)), "y": np.asarray(normal(3, 64, 8))}
    return params, opt, batch


def shapes_of_state() -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state())


def expected(steps: int) -> Any:
    return steps_of_one_device("mlp", steps)


def small_step(params: Any, opt_state: Any, batch: Any) -> Any:
    """A train step of few ops, for tests that are not about the program."""
    loss_of = jax.value_and_grad(lambda w: jnp.mean((batch["x"] @ w) ** 2))
    loss, gradient = loss_of(params["w"])
    momentum = 0.9 * opt_state["m"] + gradient
    opt_state = {"m": momentum, "step": opt_state["step"] + 1}
    return {"w": params["w"] - 0.1 * momentum}, opt_state, loss


def small_state() -> tuple[Any, Any, Any]:
    opt = {"m": jnp.zeros((16, 32)), "step": jnp.int32(0)}
    return {"w": normal(0, 16, 32) * 0.2}, opt, {"x": np.asarray(normal(1, 64, 16))}


PROGRAMS = {"small": (small_step, small_state), "mlp": (train_step, state)}


@cache
def steps_of_one_device(name: str, steps: int) -> Any:
    step, state = PROGRAMS[name]
    return _steps(jax.jit(step), state(), steps)


def _steps(step: Any, state: Any, steps: int) -> Any:
    *state, batch = state
    loss = None
    for _ in range(steps):
        *state, loss = step(*state, batch)
    return (*state, loss)
