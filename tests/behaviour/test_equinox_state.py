"""Equinox models with state (BatchNorm), beside `filter_jit`."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import rhino_jax as rhino
from tests.behaviour.compare import assert_same, mesh_of
from tests.cases import covering


eqx = pytest.importorskip("equinox")

OPTIMIZER = optax.sgd(0.1, momentum=0.9)


class Net(eqx.Module):
    linear: Any
    norm: Any
    drop: Any

    def __init__(self, key: jax.Array) -> None:
        self.linear = eqx.nn.Linear(8, 16, key=key)
        self.norm = eqx.nn.BatchNorm(16, "batch", mode="batch")
        self.drop = eqx.nn.Dropout(0.3)

    def __call__(self, x: jax.Array, state: Any, key: jax.Array) -> Any:
        x, state = self.norm(self.linear(x), state)
        return self.drop(x, key=key), state


def step(model: Any, state: Any, moments: Any, x: jax.Array, key: jax.Array) -> Any:
    def loss(model: Any, state: Any) -> Any:
        apply = jax.vmap(model, (0, None, 0), (0, None), axis_name="batch")
        out, state = apply(x, state, jax.random.split(key, x.shape[0]))
        return jnp.mean((out - 1) ** 2), state

    (value, state), grads = eqx.filter_value_and_grad(loss, has_aux=True)(model, state)
    updates, moments = OPTIMIZER.update(grads, moments)
    return eqx.apply_updates(model, updates), state, moments, value


def batch() -> jax.Array:
    return jax.random.normal(jax.random.key(1), (16, 8))


def make() -> Any:
    model, state = eqx.nn.make_with_state(Net)(jax.random.key(0))
    return model, state, OPTIMIZER.init(eqx.filter(model, eqx.is_inexact_array))


@cache
def trained() -> tuple[list[Any], Any]:
    """Return the losses of three steps under `filter_jit`, and the state after them."""
    state, single, losses = make(), eqx.filter_jit(step), []
    for i in range(3):
        *state, value = single(*state, batch(), jax.random.key(i))
        losses.append(value)
    return losses, state


@pytest.mark.parametrize("is_jitted", covering([False, True]))
def test_state_is_passed_on_as_under_filter_jit(is_jitted: bool) -> None:
    fn = eqx.filter_jit(step) if is_jitted else step
    sharded = rhino.auto_shard(
        fn,
        mesh=mesh_of((4, 2)),
        hardware="v5e",
        progress=False,
        donate_argnums=(0, 1, 2),
    )
    got, x = make(), batch()
    losses, expected = trained()
    for i, loss in enumerate(losses):
        *got, value = sharded(*got, x, jax.random.key(i))
        assert_same(loss, value, 1e-5)
    assert_same(eqx.filter(expected, eqx.is_array), eqx.filter(got, eqx.is_array), 2e-5)
    plan = sharded.plan(*got, x, jax.random.key(0))
    tied = {leaf.path for leaf in plan.outputs}
    assert "out: model.linear.weight" in tied
    assert len([path for path in tied if path.startswith("out: state")]) == 3
