"""Loops over layers in fewer parts than there are stages, and which parts are tried."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rhino_jax as rhino
from rhino_jax.passes.staged.layers import Layers
from rhino_jax.planner.staging.loops import parts_of


WIDTH, ROWS = 16, 16


def loss(params, batch):
    def layer(h, w):
        return h + jnp.tanh(h @ w["up"]) @ w["down"], None

    h = jax.lax.scan(layer, batch["x"], params["layers"])[0]
    return jnp.mean((jnp.tanh(h @ params["head"]) - batch["y"]) ** 2)


def train_step(params, batch):
    value, gradients = jax.value_and_grad(loss)(params, batch)
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(gradients)))
    scale = jnp.minimum(1.0, 0.5 / norm)
    return jax.tree.map(lambda p, g: p - scale * g, params, gradients), value


@functools.partial(jax.jit, static_argnames=("layers", "head"))
def arguments(layers=3, head=WIDTH):
    keys = iter(jax.random.split(jax.random.key(0), 5))

    def draw(*shape):
        return jax.random.normal(next(keys), shape) / 4

    stacks = {"up": draw(layers, WIDTH, 32), "down": draw(layers, 32, WIDTH)}
    params = {"layers": stacks, "head": draw(WIDTH, head)}
    return params, {"x": draw(ROWS, WIDTH), "y": draw(ROWS, head)}


def planned(layers=3, head=WIDTH, **options):
    plan_options = {"stages": 4, "microbatches": 4, "schedule": "1f1b", **options}
    args = jax.eval_shape(lambda: arguments(layers, head))
    return rhino.plan(train_step, *args, donate_argnums=0, **plan_options)


def places(plan):
    return {leaf.path: (leaf.stage, leaf.num_stages) for leaf in plan.inputs}


def test_small_moments_of_a_stack_are_where_its_layers_are():
    """One number per layer, scaled by a norm that is made elsewhere."""

    def adam_step(params, mu, batch):
        def loss(params):
            def layer(h, w):
                return h + jnp.tanh(h * w["gain"] @ w["up"]) @ w["down"], None

            return jnp.mean(jax.lax.scan(layer, batch, params)[0] ** 2)

        g = jax.grad(loss)(params)
        # As `optax.global_norm` squares real and imaginary parts.
        squares = [g * g + jnp.square(jnp.zeros_like(g)) for g in jax.tree.leaves(g)]
        norm = jnp.sqrt(sum(map(jnp.sum, squares)))
        g = jax.tree.map(lambda g: g / jnp.broadcast_to(norm, g.shape), g)
        mu = jax.tree.map(lambda m, g: 0.9 * m + g, mu, g)
        return jax.tree.map(lambda p, m: p - m, params, mu), mu

    stacks = jax.eval_shape(lambda: arguments(4))[0]["layers"]
    stacks["gain"] = jax.ShapeDtypeStruct((4,), jnp.float32)
    batch = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    plan = rhino.plan(
        adam_step, stacks, stacks, batch, stages=4, microbatches=2, schedule="1f1b"
    )
    assert {at for path, at in places(plan).items() if path != "batch"} == {(0, 4)}
    sent = [s for stage in plan.stages for s in stage.sends if "update" in s.what]
    assert sent and all(send.bytes == 4 for send in sent)


def two_steps(step, params, batch):
    for _ in range(2):
        params, value = step(params, batch)
    return params, value


def check_two_steps(plan, *args):
    expected = two_steps(jax.jit(train_step), *args)
    got = two_steps(plan.jit(train_step, donate_argnums=0), *plan.put(args))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    return got


@pytest.fixture(scope="module")
def plan():
    return planned()


def test_three_layers_are_on_three_of_four_stages(plan):
    at = places(plan)
    assert at["params['layers']['up']"] == (0, 3) and at["params['head']"] == (3, 1)
    up = plan.in_shardings[0]["layers"]["up"]
    assert up.spec[0] == "stage" and up.mesh.shape["stage"] == 3
    assert len(up.device_set) == 6


@pytest.mark.slow
def test_steps_of_three_of_four_stages_are_those_of_one_device(plan):
    params, _ = check_two_steps(plan, *arguments())
    assert jax.tree.map(lambda x: x.sharding, params) == plan.in_shardings[0]


PINNED = {
    "layers": 2,
    "pins": {"params['head']": 2},
    "schedule": "gpipe",
    "stages": 3,
    "mesh": {"stage": 3, "data": 2},
}
UNEQUAL = {"layers": 6, "head": 1024, "stages": [4, 2, 2]}


@pytest.mark.slow
@pytest.mark.parametrize("options", [PINNED, UNEQUAL], ids=["pinned", "unequal"])
def test_two_steps_are_those_of_one_device(options):
    check_two_steps(
        planned(**options), *arguments(options["layers"], options.get("head", WIDTH))
    )


def test_parts_are_where_what_is_pinned_leaves_room():
    plan = planned(**PINNED)
    assert places(plan)["params['layers']['up']"] == (0, 2)


def test_groups_of_unequal_size_have_unequal_parts():
    plan = planned(**UNEQUAL)
    at = places(plan)["params['layers']['up']"]
    assert at == (0, 2)
    up = plan.in_shardings[0]["layers"]["up"]
    assert up.mesh.shape["stage"] == 3 and len(up.device_set) == 6


def test_state_is_made_where_it_lies(plan):
    made = plan.init(lambda: arguments()[0])
    assert jax.tree.map(lambda x: x.sharding, made) == plan.in_shardings[0]


def test_a_changed_plan_has_parts_too(plan):
    assert places(plan.with_(microbatches=8)) == places(plan)


@pytest.mark.slow
def test_an_evaluation_has_parts_too(plan):
    params, batch = arguments()
    step = rhino.auto_shard(loss, like=plan)
    found = step.plan(params, batch)
    assert found.in_shardings[0] == plan.in_shardings[0]
    placed, rows = plan.put((params, batch))
    np.testing.assert_allclose(step(placed, rows), loss(params, batch), rtol=1e-5)


@pytest.mark.slow
def test_tasks_are_compiled(plan):
    assert plan.verify(train_step, *arguments()).ok


def test_places_are_told(plan):
    why = " ".join(str(plan.why("params['layers']['up']")).split())
    assert "each of stages 0 to 2 has its part of the stack, this one layer 0" in why


@pytest.mark.slow
def test_checkpoints_of_other_stages_are_read(plan, tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint")
    params, batch = plan.put(arguments())
    params, _ = plan.jit(train_step, donate_argnums=0)(params, batch)
    with ocp.StandardCheckpointer() as saver:
        saver.save(tmp_path / "state", params)
    expected = two_steps(jax.jit(train_step), *arguments())
    for options in ({"stages": 2}, {"stages": 1, "schedule": "auto"}, {}):
        other = planned(**options)
        wanted = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
            jax.eval_shape(lambda: arguments()[0]),
            other.in_shardings[0],
        )
        with ocp.StandardCheckpointer() as saver:
            restored = saver.restore(tmp_path / "state", wanted)
        rows = other.put(arguments())[1]
        got = other.jit(train_step, donate_argnums=0)(restored, rows)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


FOUR = (1,) * 4


def sizes_of(took, shares, *lengths, rest=0.0, after=()):
    """Of loops that take so long, and each of which comes after some others."""
    layers = [
        Layers(length, frozenset({k}), (), frozenset(after if k else ()))
        for k, length in enumerate(lengths)
    ]
    forms = parts_of(layers, took, rest, shares)
    return [[(s.sizes, s.first) for s in stacks] for stacks in forms]


def test_parts_are_as_even_as_layers_allow():
    # Layers alone: as many parts as there are stages, or as divide their number.
    assert sizes_of([1.0], FOUR, 12) == [[((3,) * 4, None)]]
    assert sizes_of([1.0], FOUR, 9) == [[((3,) * 3, None)]]
    assert sizes_of([1.0], FOUR, 5) == [[]]
    # Logits that take as much as a few layers may be better on a stage of their own.
    assert sizes_of([1.0], FOUR, 12, rest=0.05) == [[((3,) * 4, None)]]
    found = sizes_of([1.0], FOUR, 12, rest=0.2)
    assert found == [[((3,) * 4, None)], [((4,) * 3, None)]]
    # Of groups of unequal size parts are as their shares.
    assert sizes_of([1.0], (2, 1, 1), 6) == [[((4, 2), 0)]]


def test_a_decoder_is_behind_its_encoder_and_two_towers_are_side_by_side():
    def decoder(took, *shares):
        return sizes_of([1.0, took], shares, 12, 12, after={0})

    assert decoder(1.0, 1, 1) == [[]]
    assert decoder(1.0, *FOUR) == [[((6, 6), None)] * 2]
    assert decoder(0.3, *FOUR) == [[((4, 4, 4), None)]]
    assert sizes_of([1.0, 1.0], (1, 1), 12, 12) == [[((6, 6), None)] * 2, []]
