"""Stages of a step in which one loop over layers follows another."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rhino_jax as rhino
from rhino_jax.errors import StageError


WIDTH, ROWS, LAYERS = 16, 16, 4


def loss(params, source, target):
    def encode(h, w):
        return h + jnp.tanh(h @ w), None

    memory = jax.lax.scan(encode, source, params["encoder"])[0]

    def decode(h, w):
        return h + jnp.tanh(h @ w + memory), None

    h = jax.lax.scan(decode, target, params["decoder"])[0]
    return jnp.mean((h - source) ** 2)


def train_step(params, source, target):
    value, gradients = jax.value_and_grad(loss)(params, source, target)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value


def arguments():
    keys = jax.random.split(jax.random.key(0), 4)
    shape = (LAYERS, WIDTH, WIDTH)
    params = {
        name: jax.random.normal(key, shape) / 4
        for name, key in zip(("encoder", "decoder"), keys[:2], strict=True)
    }
    return params, *(jax.random.normal(key, (ROWS, WIDTH)) for key in keys[2:])


def plan(stages, **options):
    options = {"microbatches": 4, "schedule": "1f1b", **options}
    return rhino.plan(
        train_step, *arguments(), mesh={"stage": stages, "data": 2}, **options
    )


def test_an_encoder_and_a_decoder_are_a_stage_each():
    found = plan(2)
    stages = {leaf.path: leaf.stage for leaf in found.inputs}
    assert stages["params['encoder']"] == 0
    assert stages["params['decoder']"] == 1
    assert not any("almost nothing" in note for note in found.notes)
    assert "stage 0" in str(found.why("params['encoder']"))


def test_two_steps_are_those_of_one_device(tmp_path):
    found = plan(2)
    found.save(tmp_path / "plan.json")
    params, *rest = arguments()
    expected = params
    for _ in range(2):
        expected, value = jax.jit(train_step)(expected, *rest)
    for each in (found, rhino.load_plan(tmp_path / "plan.json")):
        step = each.jit(train_step)
        got = each.put((params, *rest))[0]
        for _ in range(2):
            got, of_stages = step(got, *rest)
        np.testing.assert_allclose(of_stages, value, rtol=1e-5)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_stages_that_get_no_layers_are_told():
    (note,) = (note for note in plan(4).notes if "almost nothing" in note)
    assert "stage 2" in note


def test_pins_against_the_order_are_refused():
    with pytest.raises(StageError, match="pinned op"):
        plan(2, pins={"params['encoder']": 1, "params['decoder']": 0})
