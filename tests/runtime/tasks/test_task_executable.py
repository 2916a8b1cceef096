"""Plans of several stages, as users run them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers_models import CASES
from helpers_steps import (
    arguments,
    loss,
    three_steps,
    three_steps_of_one_device,
    train_step,
)

import rhino_jax as rhino
from rhino_jax.errors import ScheduleError, StageError, TraceError
from rhino_jax.ir.spec import even_part
from rhino_jax.models import registry
from rhino_jax.passes.staged.step import TaskKind
from rhino_jax.runtime.tasks.controller import Controller
from tests.behaviour.random_steps import TARGET
from tests.cases import covering
from tests.runtime.stand_in import assert_close


@pytest.fixture(scope="module")
def plan():
    options = {"mesh": {"stage": 2, "data": 2}, "microbatches": 4}
    return rhino.plan(train_step, *arguments(), donate_argnums=(0, 1), **options)


@pytest.fixture(scope="module")
def loaded(plan, tmp_path_factory):
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    plan.save(path)
    return rhino.load_plan(path)


@pytest.fixture(scope="module")
def step(loaded):
    """The step of a plan that was saved and loaded, compiled once for several tests."""
    return loaded.jit(train_step, donate_argnums=(0, 1))


@pytest.mark.parametrize(
    "options",
    covering(
        [
            {"mesh": {"stage": 2}, "microbatches": 4, "schedule": "interleaved"},
            {"mesh": {"stage": 4}, "microbatches": 8},
            {"mesh": {"stage": 4, "data": 2}, "microbatches": 8},
            {"stages": 2},
            {"mesh": {"stage": 2}, "microbatches": 4, "schedule": "zero-bubble"},
            {
                "mesh": {"model": 2, "stage": 2},
                "microbatches": 4,
                "schedule": "gpipe",
                "pins": {"params['layers'][0]": jax.P(None, "model")},
            },
            {"mesh": {"stage": 2}, "microbatches": 4, "schedule": "zero-bubble-v"},
            {"mesh": {"stage": 2}, "microbatches": 4, "schedule": "searched"},
            {"stages": (4, 2, 2), "microbatches": 4},
            {"stages": [2, 1, 5], "microbatches": 8, "schedule": "1f1b"},
        ],
    ),
    ids=str,
)
def test_three_steps_are_those_of_one_device(options):
    step = rhino.auto_shard(train_step, donate_argnums=(0, 1), **options)
    got = three_steps(step, *arguments())
    assert_close(got, three_steps_of_one_device())
    assert_stands_on_its_stages(got[0], step.last_plan)


def assert_stands_on_its_stages(params, plan):
    homes = {x.sharding.mesh.devices.ravel()[0].id for x in jax.tree.leaves(params)}
    assert 1 < len(homes) <= len(plan.stages)
    for x, leaf in zip(jax.tree.leaves(params), plan.inputs, strict=False):
        assert x.sharding.mesh == plan.stages[leaf.stage].mesh
    devices = sorted(d for stage in plan.stages for d in stage.devices)
    assert devices == list(range(len(devices)))


def test_a_saved_plan_runs_as_well(plan, loaded, step):
    assert (loaded.stages, loaded.pipeline) == (plan.stages, plan.pipeline)
    assert (loaded.inputs, loaded.outputs) == (plan.inputs, plan.outputs)
    got = three_steps(step, *arguments())
    assert_close(got, three_steps_of_one_device())
    assert_stands_on_its_stages(got[0], plan)


def test_state_is_put_where_its_stage_is(plan):
    params, state, batch = arguments()
    put, *_ = plan.put((params, state, batch))
    for x, sharding in zip(
        jax.tree.leaves(put), jax.tree.leaves(plan.in_shardings[0]), strict=True
    ):
        assert x.sharding == sharding
    made = plan.init(lambda: params)
    assert jax.tree.map(lambda x: x.sharding, made) == plan.in_shardings[0]


def test_a_step_is_simulated():
    plan = rhino.plan(train_step, *arguments(), mesh={"stage": 2}, microbatches=8)
    simulation = plan.simulate()
    assert simulation.step_time_s == plan.predicted.step_time_s
    assert 0 < simulation.bubble < 0.5
    assert simulation.table().count("B7") == 2
    assert plan.simulate(jitter=0.1).step_times_s.shape == (256,)
    for wrong in (-0.1, float("nan"), "0.1", True):
        with pytest.raises(ScheduleError, match="jitter must be") as caught:
            plan.simulate(jitter=wrong)
        assert repr(wrong) in caught.value.numbers
    assert plan.microbatches == 8
    assert "one step" in plan.table() and f"{plan.schedule}, 8" in plan.table()


UNEQUAL = {"stages": [4, 2, 2], "microbatches": 8}
SMALL = {"d_model": 32, "d_ff": 64, "num_heads": 2}


# In the short run `test_steps_in_slices` has a GPT, `test_stacks_of_results` a loop.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "overrides", "options"),
    [
        ("gpt-tiny", SMALL, {"mesh": {"stage": 2, "data": 2}}),
        ("gpt-tiny-unrolled", SMALL, {}),
        ("t5-tiny", SMALL, {"mesh": {"stage": 2, "data": 4}}),
        ("unet-tiny", {}, {"mesh": {"stage": 2, "data": 4}}),
        ("gpt-tiny-unrolled", SMALL, UNEQUAL),
        ("llama-tiny", {"num_kv_heads": 1, **SMALL}, UNEQUAL),
        ("unet-tiny", {}, UNEQUAL),
        (
            "wide-resnet-tiny",
            {"batch": 8},
            {"mesh": {"stage": 2, "data": 2}, "per_microbatch": "batch_norm"},
        ),
    ],
    ids=str,
)
def test_models_of_the_zoo_are_checked_against_one_device(name, overrides, options):
    workload = registry.get(name, optimizer="sgd", **overrides)
    args, donated = workload.make_args(jax.random.key(0)), workload.donate_argnums
    options = {"stages": 2, "microbatches": 4, **options}
    plan = rhino.plan(workload.step, *args, donate_argnums=donated, **options)
    found = plan.check(workload.step, *args)
    # The bias of a key shifts all scores of a row alike: its gradient is noise.
    wrong = [x for x in found.leaves if not x.ok and "['k']['bias']" not in x.path]
    assert len(plan.stages) > 1 and found.leaves and not wrong


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["equinox_mlp", "linen_transformer", "nnx_state", "equinox_attention"]
)
def test_models_of_frameworks_are_checked_against_one_device(name):
    step, args, donated = CASES[name]("sgd")
    plan = rhino.plan(
        step, *args, mesh={"stage": 2}, microbatches=4, donate_argnums=donated
    )
    found = plan.check(step, *args)
    assert len(plan.stages) == 2 and found.leaves and found.ok


def test_a_task_that_fails_leaves_the_state(step, monkeypatch):
    args = step.plan(*arguments()).put(arguments())
    dispatch, done = Controller._dispatch, []

    def fails(self, place, now, once):
        done.append(place)
        if place[0] is TaskKind.BACKWARD and len(done) > 4:
            raise FloatingPointError("a task failed")
        return dispatch(self, place, now, once)

    monkeypatch.setattr(Controller, "_dispatch", fails)
    with pytest.raises(FloatingPointError) as caught:
        step(*args)
    assert any(place[0] is TaskKind.FORWARD for place in done)
    assert not any(x.is_deleted() for x in jax.tree.leaves(args))
    (note,) = caught.value.__notes__
    assert "micro-batch" in note and "arguments are as they were" in note
    monkeypatch.undo()
    assert_close(three_steps(step, *args), three_steps_of_one_device())


def test_what_an_interrupted_update_leaves_is_said(step, monkeypatch):
    args = step.plan(*arguments()).put(arguments())
    dispatch = Controller._dispatch

    def interrupted(self, place, now, once):
        dispatch(self, place, now, once)
        if any(x.is_deleted() for x in jax.tree.leaves(args)):
            raise KeyboardInterrupt

    monkeypatch.setattr(Controller, "_dispatch", interrupted)
    with pytest.raises(KeyboardInterrupt) as caught:
        step(*args)
    (note,) = caught.value.__notes__
    gone = sum(x.is_deleted() for x in jax.tree.leaves(args))
    assert f"arguments gone: {gone} of {len(jax.tree.leaves(args))}" in note
    assert "`update_" in note and "micro-batch" not in note
    monkeypatch.undo()
    # What is left of them must not be lost as well.
    alive = [x for x in jax.tree.leaves(args) if not x.is_deleted()]
    with pytest.raises(TraceError, match="is given deleted arrays") as refused:
        step(*args)
    assert f"{gone} of " in refused.value.numbers
    assert alive and not any(x.is_deleted() for x in alive)


def test_donated_arrays_that_are_given_again_are_named(step):
    params, state, batch = arguments()
    step(params, state, batch)  # moved, and deleted then
    with pytest.raises(TraceError, match="is given deleted arrays") as caught:
        step(params, state, batch)
    assert caught.value.where == "params['head']"


def test_what_cannot_be_is_refused(step):
    args = arguments()
    with pytest.raises(StageError, match="no axis `stage` of size 4"):
        rhino.plan(train_step, *args, stages=4, mesh={"stage": 2, "data": 4})
    with pytest.raises(StageError, match="3 equal stages"):
        rhino.plan(train_step, *args, stages=3)
    plan = rhino.plan(train_step, *args, mesh={"data": 8}, level="fast")
    with pytest.raises(ScheduleError, match="one stage"):
        plan.simulate()
    with pytest.raises(StageError, match="no fused weights in blocks"):
        rhino.plan(train_step, *args, stages=2, storage="blocks")
    with pytest.raises(StageError, match="no one program to lower"):
        step.lower(*args)


def test_state_that_comes_back_unchanged_and_numbers_of_python():
    """As coefficients of optax's muon, and the step of Flax's `TrainState`.

    An array that is donated and returned as it came stays alive, one that is read and
    one that is not; a number starts as `0`, and is read by all stages; one array has
    four bits an element.
    """

    def step(params, kept, number, batch):
        value, gradients = jax.value_and_grad(loss)(params, batch)
        rate = kept["rate"].sum() * kept["four_bits"].astype(float)[0] / (1 + number)
        params = jax.tree.map(lambda p, g: p - rate * g, params, gradients)
        return params, kept, number + 1, value

    def three(step, params, _, batch):
        kept = {"rate": np.full(2, 0.05, np.float32), "unread": np.ones(3, np.float32)}
        kept["four_bits"] = np.ones(4, jnp.int4)
        state = params, jax.tree.map(jnp.asarray, kept), 0
        for _ in range(3):
            *state, value = step(*state, batch)
        return state, value

    options = {"mesh": {"stage": 2, "data": 2}, "microbatches": 4}
    run = rhino.auto_shard(step, donate_argnums=(0, 1), **options)
    got = three(run, *arguments())
    assert len(run.last_plan.stages) == 2
    assert_close(got, three(jax.jit(step), *arguments()))
    np.testing.assert_array_equal(got[0][1]["unread"], np.ones(3))
    np.testing.assert_allclose(got[0][1]["rate"], [0.05, 0.05])


@pytest.mark.slow
def test_arrays_between_tasks_are_even_where_ops_pad_them():
    """Scores against one own key and 64 others: 65 columns, on four devices."""

    def encode(params, x):
        h = jax.nn.relu(x @ params[0]) @ params[1]
        return h / jnp.linalg.norm(h, axis=-1, keepdims=True)

    def step(params, keys, queue, x, y):
        others = encode(keys, y)

        def contrast(params):
            mine = encode(params, x)
            own = (mine * others).sum(-1, keepdims=True)
            scores = jnp.concatenate([own, mine @ queue.T], 1)
            return -jax.nn.log_softmax(scores / 0.2)[:, 0].mean()

        value, grads = jax.value_and_grad(contrast)(params)
        return [p - 0.1 * g for p, g in zip(params, grads, strict=True)], value

    rng = np.random.default_rng(0)
    shapes = ((32, 32), (32, 16), (64, 16), (16, 32))
    up, down, queue, x = (rng.normal(size=s).astype("f") for s in shapes)
    args = [up, down], [up + 1, down], queue, x, x[::-1]
    mesh = {"stage": 2, "x": 2, "y": 2}
    sharded = rhino.auto_shard(step, mesh=mesh, microbatches=2, hardware=TARGET)
    assert_close(sharded(*args), jax.jit(step)(*args))


def test_the_even_part_of_a_spec_keeps_the_first_axes_that_divide():
    spec, sizes = ((1, 0), (0,), (2,)), (2, 4, 3)
    assert even_part(spec, (8, 6, 9), sizes) == spec
    assert even_part(spec, (4, 5, 0), sizes) == ((1,), (), (2,))
