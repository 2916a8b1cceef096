"""`like=`: a model that is edited here and there is cut where it was."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import rhino_jax as rhino


WIDTH, ROWS, LAYERS = 64, 512, 8


def step_of(layer, order=range(LAYERS)):
    def train_step(params, x):
        def loss(params):
            h = x
            for i in [*order, *range(LAYERS, len(params))]:
                h = layer(h, params[i])
            return jnp.mean((h - x) ** 2)

        gradients = jax.grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)

    return train_step


def tanh(h, w):
    return jnp.tanh(h @ w)


def gelu(h, w):
    return jax.nn.gelu(h @ w) + 0.1 * h


def planned(step, layers=LAYERS, **plan_options):
    return rhino.plan(
        step,
        [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * layers,
        jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32),
        donate_argnums=0,
        microbatches=4,
        schedule="1f1b",
        **plan_options,
    )


def stages(plan, layers=LAYERS):
    return [leaf.stage for leaf in plan.inputs[:layers]]


@pytest.fixture(scope="module")
def uneven():
    """Cut where nobody would without being told."""
    pins = {"params[5]": 0, "params[6]": 1}
    plan = planned(step_of(tanh), mesh={"stage": 2}, hardware="h100", pins=pins)
    assert stages(plan) == [0] * 6 + [1] * 2
    return plan


def test_another_layer_leaves_the_cut_where_it_was(uneven):
    plan = planned(step_of(gelu), LAYERS + 1, like=uneven)
    assert stages(plan, LAYERS + 1) == [0] * 6 + [1] * 3
    assert any("9 of 9 are in the stages where they were" in n for n in plan.notes)
    # The results are where the arguments are, for the next step.
    assert [leaf.stage for leaf in plan.outputs] == stages(plan, LAYERS + 1)


def test_stages_that_are_asked_for_are_cut_anew(uneven):
    plan = planned(step_of(gelu), like=uneven, stages=2)
    assert stages(plan) == [0] * 4 + [1] * 4


def test_pins_come_before_what_is_kept(uneven):
    pins = {"params[5]": 1}
    plan = planned(step_of(tanh), like=uneven, pins=pins)
    assert stages(plan) == [0] * 5 + [1] * 3


def test_layers_in_another_order_are_cut_anew(uneven):
    order = [7, 6, 5, 4, 3, 2, 1, 0]
    plan = planned(step_of(tanh, order), like=uneven)
    assert stages(plan) == [1] * 4 + [0] * 4
    (said,) = [n for n in plan.notes if "split into stages again" in n]
    assert "stage" in said


def test_loops_keep_their_parts():
    def train_step(params, x):
        def loss(params):
            h, _ = jax.lax.scan(lambda h, w: (tanh(h, w), None), x, params["loop"])
            return jnp.mean((h @ params["head"] - x) ** 2)

        gradients = jax.grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)

    def plan(**plan_options):
        shape = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
        loop = jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32)
        x = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
        args = {"head": shape, "loop": loop}, x
        plan_options = {"schedule": "1f1b", "microbatches": 4, **plan_options}
        return rhino.plan(train_step, *args, donate_argnums=0, **plan_options)

    first = plan(mesh={"stage": 4}, hardware="h100")
    again = plan(like=first, microbatches=8)
    for one, other in zip(first.inputs, again.inputs, strict=True):
        assert (one.stage, one.num_stages) == (other.stage, other.num_stages)
    assert {leaf.num_stages for leaf in first.inputs} == {1, 4}
