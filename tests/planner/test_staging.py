"""Plans of several stages: what passes between them, and what their user asked for."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import rhino_jax as rhino
from rhino_jax.models import registry
from tests.cases import covering


MESH = {"stage": 2, "data": 2}
WIDE, NARROW, ROWS = 256, 32, 8


def tied(params, x):
    """A weight that is read first and last."""
    h = jnp.tanh(x @ params["w"])
    for p in params["middle"]:
        h = jnp.tanh(h @ p)
    return h @ params["w"].T


def train_step(params, x):
    gradients = jax.grad(lambda p: jnp.mean((tied(p, x) - x) ** 2))(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)


def arguments():
    def f32(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    params = {"w": f32(WIDE, NARROW), "middle": [f32(NARROW, NARROW)] * 4}
    return params, f32(ROWS, WIDE)


def test_what_passes_once_a_step_is_not_counted_for_every_micro_batch():
    options = {"mesh": MESH, "schedule": "1f1b", "donate_argnums": 0}
    plan = rhino.plan(train_step, *arguments(), microbatches=4, **options)
    (hop,) = plan.pipeline.hops
    one = 4 * ROWS // plan.microbatches * NARROW
    assert 0 < hop.forward_bytes <= 2 * one and 0 < hop.backward_bytes <= 2 * one
    weight = 4 * WIDE * NARROW
    assert max(send.bytes for stage in plan.stages for send in stage.sends) == weight


@pytest.mark.parametrize("pin", [jax.P("data"), jax.P(None, "data")], ids=str)
def test_results_are_pinned_and_programs_may_have_no_backward_pass(pin):
    params, x = arguments()
    plan = rhino.plan(tied, params, x, mesh=MESH, microbatches=4, pins={"out": pin})
    assert plan.out_specs == pin and plan.schedule == "forward-only"


def test_a_pin_of_a_stack_may_name_the_axis_of_the_stages():
    def step(params, x):
        def loss(params):
            h = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params["up"])[0]
            return jnp.mean((h - x) ** 2)

        gradients = jax.grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)

    params = {"up": jax.ShapeDtypeStruct((4, NARROW, NARROW), jnp.float32)}
    x = jax.ShapeDtypeStruct((ROWS, NARROW), jnp.float32)
    path, pin = "params['up']", jax.P("stage", None, "data")
    options = {"mesh": MESH, "schedule": "1f1b", "level": "fast", "donate_argnums": 0}
    plan = rhino.plan(step, params, x, pins={path: pin}, microbatches=4, **options)
    (leaf,) = [leaf for leaf in plan.inputs if leaf.path == path]
    assert leaf.spec == ((0,), (), (1,))
    assert plan.in_specs[0]["up"] == pin


def three_kinds(params, x):
    h = x
    with jax.named_scope("encoder"):
        for w in params["first"]:
            h = jnp.tanh(h @ w)
    with jax.named_scope("decoder"):
        for w in params["last"]:
            h = jnp.tanh(h @ w)
    return h


def pinned_step(params, x):
    gradients = jax.grad(lambda p: jnp.mean((three_kinds(p, x) - x) ** 2))(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)


def planned_with(pins, **plan_options):
    def f32(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    params = {"first": [f32(NARROW, NARROW)] * 6, "last": [f32(NARROW, NARROW)] * 2}
    usual = {"mesh": MESH, "microbatches": 4, "schedule": "1f1b", "level": "fast"}
    plan_options = {**usual, **plan_options}
    return rhino.plan(pinned_step, params, f32(ROWS, NARROW), pins=pins, **plan_options)


@pytest.fixture(scope="module")
def free():
    """The stages of arguments where none is pinned."""
    return homes(planned_with(None))


def homes(plan):
    return {leaf.path: leaf.stage for leaf in plan.inputs}


@pytest.mark.parametrize(
    ("pins", "path", "stage"),
    [
        ({"decoder": 1, "encoder": 0}, "params['first'][5]", 0),
        ({"params['first'][1]": 1}, "params['first'][2]", 1),
        ({"params['last']*": 1, "params['first'][5]": 0}, "params['first'][5]", 0),
    ],
    ids=["scopes", "path", "glob"],
)
def test_what_is_pinned_to_a_stage_is_there(free, pins, path, stage):
    found = homes(planned_with(pins))
    assert found[path] == stage and found["params['last'][1]"] == 1
    assert found != free


def test_pins_of_stages_that_cannot_be_are_refused():
    with pytest.raises(rhino.PinError, match="there is no stage 2"):
        planned_with({"params['first'][0]": 2})
    with pytest.raises(rhino.PinError, match="say how many stages"):
        planned_with({"params['first'][0]": 1}, mesh={"data": 4})
    with pytest.raises(rhino.PinError, match="matches nothing"):
        planned_with({"params['frist'][0]": 1})
    with pytest.raises(rhino.PinError, match="two stages of one op"):
        planned_with({"params['first'][0]": 1, "encoder": 0})
    with pytest.raises(rhino.StageError, match="fix"):
        planned_with({"encoder": 1, "decoder": 0})


@pytest.mark.parametrize("model", covering(["mlp-tiny", "gpt-tiny", "unet-tiny"]))
def test_tasks_take_together_what_their_stage_is_predicted_to(model):
    """Values that are laid out anew for several readers, and new state that is laid out
    as the old, are some task's too."""
    workload = registry.get(model)
    plan = rhino.plan(
        workload.step,
        *workload.abstract_args(),
        mesh={"stage": 2, "data": 2, "model": 2},
        hardware="v5e:2x4",
        donate_argnums=workload.donate_argnums,
        microbatches=4,
        schedule="1f1b",
        level="fast",
    )
    for stage, cost in zip(plan.stages, plan.pipeline.costs, strict=True):
        took = 4 * (cost.forward_s + cost.backward_s) + cost.update_s
        assert took == pytest.approx(stage.predicted.step_time_s)


@pytest.mark.parametrize("options", [{"mesh": {"data": 4}}, {"stages": 1}], ids=str)
def test_a_schedule_that_has_no_say_is_told_of(options):
    plan = rhino.plan(train_step, *arguments(), schedule="gpipe", **options)
    assert sum("schedule='gpipe' has no effect" in note for note in plan.notes) == 1
    assert "has no effect" in plan.table()


@pytest.mark.parametrize("schedule", ["forward-only", "gpipe"])
def test_programs_without_a_backward_pass_run_by_any_schedule(schedule):
    plan_options = {"mesh": MESH, "microbatches": 4, "schedule": schedule}
    assert rhino.plan(tied, *arguments(), **plan_options).schedule == "forward-only"
    if schedule == "forward-only":
        with pytest.raises(rhino.ScheduleError, match="and this has one"):
            rhino.plan(train_step, *arguments(), donate_argnums=0, **plan_options)
