"""Plans of several stages, as users run them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers_models import CASES

import rhino_jax as rhino
from rhino_jax.apply.tasks.controller import Controller
from rhino_jax.errors import ScheduleError, StageError, TraceError
from rhino_jax.models import registry
from rhino_jax.transform.staged.step import TaskKind


D, F, ROWS = 16, 32, 16


def loss(params, batch):
    x = batch["x"]
    for p in params["layers"]:
        x = x + jax.nn.gelu(x @ p["up"]) @ p["down"]
    return jnp.mean((x @ params["head"] - batch["y"]) ** 2)


OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-3))


def train_step(params, state, batch):
    value, gradients = jax.value_and_grad(loss)(params, batch)
    updates, state = OPTIMIZER.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, value


def arguments(layers=4):
    keys = iter(jax.random.split(jax.random.key(0), 20))
    params = {
        "layers": [
            {
                "up": jax.random.normal(next(keys), (D, F)) / 4,
                "down": jax.random.normal(next(keys), (F, D)) / 6,
            }
            for _ in range(layers)
        ],
        "head": jax.random.normal(next(keys), (D, 8)) / 4,
    }
    batch = {
        "x": jax.random.normal(next(keys), (ROWS, D)),
        "y": jax.random.normal(next(keys), (ROWS, 8)),
    }
    return params, OPTIMIZER.init(params), batch


def three_steps(step, params, state, batch):
    losses = []
    for _ in range(3):
        params, state, value = step(params, state, batch)
        losses.append(float(value))
    return params, state, losses


@pytest.fixture(scope="module")
def expected():
    return three_steps(jax.jit(train_step), *arguments())


def assert_equal(got, expected):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"stages": 2},
        {"mesh": {"stage": 4, "data": 2}, "microbatches": 8},
        {"mesh": {"model": 2, "stage": 2}, "microbatches": 4, "schedule": "gpipe"},
        {"stages": 2, "microbatches": 4, "schedule": "zero-bubble"},
        {"stages": 2, "microbatches": 4, "schedule": "interleaved"},
        pytest.param(
            {"stages": 2, "microbatches": 4, "schedule": "zero-bubble-v"},
            marks=pytest.mark.slow,
        ),
        {"stages": 2, "microbatches": 4, "schedule": "searched"},
        {"stages": (4, 2, 2), "microbatches": 4},
        {"stages": [2, 1, 5], "microbatches": 8, "schedule": "1f1b"},
    ],
    ids=str,
)
def test_three_steps_are_those_of_one_device(options, expected):
    step = rhino.auto_shard(train_step, donate_argnums=(0, 1), **options)
    got = three_steps(step, *arguments())
    assert_equal(got, expected)
    plan = step.last_plan
    homes = {x.sharding.mesh.devices.ravel()[0].id for x in jax.tree.leaves(got[0])}
    assert 1 < len(homes) <= len(plan.stages)
    for x, leaf in zip(jax.tree.leaves(got[0]), plan.inputs, strict=False):
        assert x.sharding.mesh == plan.stages[leaf.stage].mesh
    devices = sorted(d for stage in plan.stages for d in stage.devices)
    assert devices == list(range(len(devices)))


def test_a_saved_plan_runs_as_well(tmp_path, expected):
    plan = rhino.plan(train_step, *arguments(), stages=2, donate_argnums=(0, 1))
    plan.save(tmp_path / "plan.json")
    loaded = rhino.load_plan(tmp_path / "plan.json")
    assert (loaded.stages, loaded.pipeline) == (plan.stages, plan.pipeline)
    assert (loaded.inputs, loaded.outputs) == (plan.inputs, plan.outputs)
    step = loaded.jit(train_step, donate_argnums=(0, 1))
    assert_equal(three_steps(step, *arguments()), expected)


def test_state_is_put_where_its_stage_is():
    params, state, batch = arguments()
    plan = rhino.plan(train_step, params, state, batch, stages=2)
    put, *_ = plan.put((params, state, batch))
    for x, sharding in zip(
        jax.tree.leaves(put), jax.tree.leaves(plan.in_shardings[0]), strict=True
    ):
        assert x.sharding == sharding
    made = plan.init(lambda: params)
    assert jax.tree.map(lambda x: x.sharding, made) == plan.in_shardings[0]


def test_a_step_is_simulated():
    plan = rhino.plan(train_step, *arguments(), stages=2, microbatches=8)
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


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gpt-tiny-unrolled", {}),
        ("gpt-tiny", {}),
        pytest.param("t5-tiny", {}, marks=pytest.mark.slow),
        pytest.param("unet-tiny", {}, marks=pytest.mark.slow),
        pytest.param("gpt-tiny-unrolled", UNEQUAL, marks=pytest.mark.slow),
        pytest.param("llama-tiny", UNEQUAL, marks=pytest.mark.slow),
        pytest.param("unet-tiny", UNEQUAL, marks=pytest.mark.slow),
        pytest.param(
            "wide-resnet-tiny",
            {"per_microbatch": "batch_norm"},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_models_of_the_zoo_are_checked_against_one_device(name, options):
    workload = registry.get(name, optimizer="sgd")
    args, donated = workload.make_args(jax.random.key(0)), workload.donate_argnums
    options = {"stages": 2, "microbatches": 4, **options}
    plan = rhino.plan(workload.step, *args, donate_argnums=donated, **options)
    found = plan.check(workload.step, *args)
    # The bias of a key shifts all scores of a row alike: its gradient is noise.
    wrong = [x for x in found.leaves if not x.ok and "['k']['bias']" not in x.path]
    assert found.leaves and not wrong


@pytest.mark.parametrize(
    "name",
    [
        "equinox_mlp",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("linen_transformer", "nnx_state", "equinox_attention")
        ),
    ],
)
def test_models_of_frameworks_are_checked_against_one_device(name):
    step, args, donated = CASES[name]("sgd")
    plan = rhino.plan(step, *args, stages=2, donate_argnums=donated)
    found = plan.check(step, *args)
    assert len(plan.stages) == 2 and found.leaves and found.ok


def test_a_stack_of_layers_is_one_array_over_all_stages(tmp_path):
    workload = registry.get("gpt-tiny", optimizer="sgd")
    args, donated = workload.make_args(jax.random.key(0)), workload.donate_argnums
    mesh = {"stage": 2, "data": 4}
    plan = rhino.plan(workload.step, *args, mesh=mesh, donate_argnums=donated)
    stacks = [leaf for leaf in plan.inputs if leaf.num_stages == 2]
    assert stacks and all(leaf.spec[0] == (0,) for leaf in stacks)
    assert all("blocks" in leaf.path for leaf in stacks)
    plan.save(tmp_path / "plan.json")
    step = rhino.load_plan(tmp_path / "plan.json").jit(
        workload.step, donate_argnums=donated
    )
    placed = plan.put(args)
    out = step(*placed)
    for x, leaf in zip(jax.tree.leaves(out[0]), plan.inputs, strict=False):
        assert x.shape == leaf.shape
        devices = 8 if leaf.num_stages == 2 else 4
        assert len(x.sharding.device_set) == devices
    out = step(*out[:2], *placed[2:])
    assert np.isfinite(float(out[2]))


def test_donated_stacks_say_so():
    workload = registry.get("gpt-tiny", optimizer="sgd")
    args, donated = workload.make_args(jax.random.key(0)), workload.donate_argnums
    mesh = {"stage": 2, "data": 4}
    plan = rhino.plan(workload.step, *args, mesh=mesh, donate_argnums=donated)
    placed = plan.put(args)
    plan.jit(workload.step, donate_argnums=donated)(*placed)
    leaves = zip(jax.tree.leaves(placed), plan.inputs, strict=True)
    stacks = [x for x, leaf in leaves if leaf.num_stages == 2 and leaf.is_donated]
    assert stacks and all(x.is_deleted() for x in stacks)


def test_a_task_that_fails_leaves_the_state(monkeypatch, expected):
    step = rhino.auto_shard(train_step, stages=2, donate_argnums=(0, 1))
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
    assert_equal(three_steps(step, *args), expected)


def test_what_an_interrupted_update_leaves_is_said(monkeypatch):
    step = rhino.auto_shard(train_step, stages=2, donate_argnums=(0, 1))
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


def test_donated_arrays_that_are_given_again_are_named():
    step = rhino.auto_shard(train_step, stages=2, donate_argnums=(0, 1))
    params, state, batch = arguments()
    step(params, state, batch)  # moved, and deleted then
    with pytest.raises(TraceError, match="is given deleted arrays") as caught:
        step(params, state, batch)
    assert caught.value.where == "params['head']"


def test_a_mesh_in_context_is_no_hindrance(expected):
    mesh = jax.make_mesh((2, 4), ("stage", "data"))
    step = rhino.auto_shard(train_step, donate_argnums=(0, 1))
    with jax.set_mesh(mesh):
        got = three_steps(step, *arguments())
    assert len(step.last_plan.stages) == 2
    assert_equal(got, expected)


def test_what_cannot_be_is_refused():
    args = arguments()
    with pytest.raises(StageError, match="no axis `stage` of size 4"):
        rhino.plan(train_step, *args, stages=4, mesh={"stage": 2, "data": 4})
    with pytest.raises(StageError, match="3 equal groups"):
        rhino.plan(train_step, *args, stages=3)
    plan = rhino.plan(train_step, *args, mesh={"data": 8})
    with pytest.raises(ScheduleError, match="one stage"):
        plan.simulate()
    with pytest.raises(StageError, match="no fused weights in blocks"):
        rhino.plan(train_step, *args, stages=2, storage="blocks")
    step = rhino.auto_shard(train_step, stages=2)
    with pytest.raises(StageError, match="no one program to lower"):
        step.lower(*args)


def test_donated_state_that_no_step_changes_comes_back_alive():
    """As the coefficients of optax's muon: an array that is returned as it came."""

    def step(params, kept, batch):
        value, gradients = jax.value_and_grad(loss)(params, batch)
        rate = kept["rate"].sum()
        params = jax.tree.map(lambda p, g: p - rate * g, params, gradients)
        return params, kept, value

    params, _, batch = arguments()
    kept = {"rate": jnp.array([0.05, 0.05]), "unread": jnp.ones(3)}
    run = rhino.auto_shard(step, donate_argnums=(0, 1), stages=2, microbatches=4)
    for _ in range(2):
        params, kept, value = run(params, kept, batch)
    np.testing.assert_array_equal(kept["unread"], np.ones(3))
    np.testing.assert_allclose(kept["rate"], [0.05, 0.05])
    assert np.isfinite(value)


def test_numbers_of_python_are_state_like_any_other():
    """As the step of Flax's `TrainState`, which starts as `0`; read by all stages."""

    def step(params, number, batch):
        value, gradients = jax.value_and_grad(loss)(params, batch)
        rate = 0.1 / (1 + number)
        params = jax.tree.map(lambda p, g: p - rate * g, params, gradients)
        return params, number + 1, value

    params, _, batch = arguments()
    run = rhino.auto_shard(step, stages=2, microbatches=4)
    got = three_steps(run, params, 0, batch)
    assert_equal(got, three_steps(jax.jit(step), params, 0, batch))
