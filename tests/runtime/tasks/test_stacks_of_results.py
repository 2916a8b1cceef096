"""Stacks of layers over stages, step after step."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rhino_jax as rhino
from tests.runtime.stand_in import normal


LAYERS, WIDTH, ROWS = 4, 8, 16


def train_step(params, x):
    def loss(params):
        layer = jax.checkpoint(lambda h, w: (jnp.tanh(h @ w), None))
        h, _ = jax.lax.scan(layer, x, params["layers"])
        return jnp.mean((h @ params["head"]) ** 2)

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value


def made():
    params = {"layers": normal(0, LAYERS, WIDTH, WIDTH), "head": normal(1, WIDTH, 2)}
    return params, normal(2, ROWS, WIDTH)


OPTIONS = {
    "mesh": {"stage": 2, "data": 2},
    "schedule": "1f1b",
    "microbatches": 4,
    "donate_argnums": 0,
}


on_one_device = jax.jit(train_step)


@pytest.fixture(scope="module")
def plan():
    return rhino.plan(train_step, *made(), **OPTIONS)


@pytest.fixture(scope="module")
def step(plan, tmp_path_factory):
    """The step of a plan that was saved and loaded."""
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    plan.save(path)
    loaded = rhino.load_plan(path)
    assert (loaded.inputs, loaded.pipeline) == (plan.inputs, plan.pipeline)
    return loaded.jit(train_step, donate_argnums=0)


def assert_close(got, expected):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_a_stack_of_layers_is_one_array_over_all_stages(plan, step):
    (stack,) = (leaf for leaf in plan.inputs if leaf.num_stages == 2)
    assert stack.path == "params['layers']" and stack.spec[0] == (0,)
    params, x = plan.put(made())
    got, _ = step(params, x)
    # Donated stacks say so.
    assert params["layers"].is_deleted() and params["head"].is_deleted()
    for name, devices in (("layers", 4), ("head", 2)):
        assert got[name].shape == made()[0][name].shape
        assert len(got[name].sharding.device_set) == devices
    expected = on_one_device(on_one_device(*made())[0], made()[1])
    assert_close(step(got, x), expected)


def test_steps_follow_each_other_and_hold_nothing_of_those_before(step):
    params, x = made()
    wanted = jax.tree.map(jnp.copy, params)
    counts = []
    for i in range(4):
        # In between as a user may have changed it: a new array, that no step made.
        if i == 2:
            params = {**params, "layers": params["layers"] + 0.0}
        before = params["layers"]
        params, value = step(params, x)
        wanted, other = on_one_device(wanted, x)
        np.testing.assert_allclose(value, other, rtol=1e-5)
        assert before.is_deleted()
        del before
        counts.append(len(jax.live_arrays()))
    assert counts[1] == counts[3]
    assert_close(params, wanted)
