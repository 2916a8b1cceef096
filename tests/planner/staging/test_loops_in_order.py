"""Stages of a step in which one loop over layers follows another."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rhino_jax as rhino
from rhino_jax.errors import StageError
from tests.cases import covering


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


@functools.partial(jax.jit, static_argnames="layers")
def arguments(layers=LAYERS):
    keys = jax.random.split(jax.random.key(0), 4)
    shape = (layers, WIDTH, WIDTH)
    params = {
        name: jax.random.normal(key, shape) / 4
        for name, key in zip(("encoder", "decoder"), keys[:2], strict=True)
    }
    return params, *(jax.random.normal(key, (ROWS, WIDTH)) for key in keys[2:])


def plan(stages, layers=LAYERS, **options):
    options = {"microbatches": 4, "schedule": "1f1b", **options}
    mesh = {"stage": stages, "data": 2}
    args = jax.eval_shape(lambda: arguments(layers))
    return rhino.plan(train_step, *args, mesh=mesh, **options)


def test_an_encoder_and_a_decoder_are_a_stage_each():
    found = plan(2)
    stages = {leaf.path: leaf.stage for leaf in found.inputs}
    assert stages["params['encoder']"] == 0
    assert stages["params['decoder']"] == 1
    assert not any("almost nothing" in note for note in found.notes)
    assert "stage 0" in str(found.why("params['encoder']"))


@functools.cache
def two_steps_on_one_device(layers):
    params, *rest = arguments(layers)
    for _ in range(2):
        params, value = jax.jit(train_step)(params, *rest)
    return params, value


def check_two_steps(found, layers=LAYERS, **options):
    params, *rest = arguments(layers)
    expected, value = two_steps_on_one_device(layers)
    step = found.jit(train_step, **options)
    got = found.put((params, *rest))[0]
    for _ in range(2):
        got, of_stages = step(got, *rest)
    np.testing.assert_allclose(of_stages, value, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_two_steps_are_those_of_one_device(tmp_path):
    found = plan(2)
    found.save(tmp_path / "plan.json")
    for each in (found, rhino.load_plan(tmp_path / "plan.json")):
        check_two_steps(each)


@functools.cache
def plan_in_four(schedule):
    return plan(4, schedule=schedule, donate_argnums=0)


def places(found):
    return {leaf.path: (leaf.stage, leaf.num_stages) for leaf in found.inputs}


@pytest.mark.parametrize("schedule", covering(["1f1b", "gpipe"]))
def test_an_encoder_and_a_decoder_have_several_stages_each(schedule):
    found = plan_in_four(schedule)
    at = places(found)
    assert at["params['encoder']"] == (0, 2) and at["params['decoder']"] == (2, 2)
    assert not any("almost nothing" in note for note in found.notes)
    why = str(found.why("params['decoder']"))
    assert "on stage 2 of 4" in why and "layers 0 to 1 of 4" in why


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_two_steps_of_several_stages_each_are_those_of_one_device(schedule, tmp_path):
    found = plan_in_four(schedule)
    found.save(tmp_path / "plan.json")
    loaded = rhino.load_plan(tmp_path / "plan.json")
    assert (loaded.inputs, loaded.outputs) == (found.inputs, found.outputs)
    check_two_steps(loaded, donate_argnums=0)


def test_stages_that_get_no_layers_are_told():
    # Of three layers no two stages have as many each, and a fourth has none.
    (note,) = (note for note in plan(4, layers=3).notes if "almost nothing" in note)
    assert "stage" in note


def test_pins_against_the_order_are_refused():
    with pytest.raises(StageError, match="pinned op"):
        plan(2, pins={"params['encoder']": 1, "params['decoder']": 0})
