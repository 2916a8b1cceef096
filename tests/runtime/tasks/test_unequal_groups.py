"""Plans whose groups of devices differ in size do all that other plans do."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from helpers_steps import (
    arguments,
    loss,
    three_steps,
    three_steps_of_one_device,
    train_step,
)

import rhino_jax as rhino
from tests.cases import covering
from tests.runtime.stand_in import assert_close


UNEQUAL = {"stages": [4, 2, 2], "microbatches": 4}


def sizes(plan):
    return [len(stage.devices) for stage in plan.stages]


def planned(**options):
    return rhino.plan(
        train_step, *arguments(), donate_argnums=(0, 1), level="fast", **options
    )


@pytest.fixture(scope="module")
def plan():
    return planned(**UNEQUAL)


@pytest.fixture(scope="module")
def loaded(plan, tmp_path_factory):
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    plan.save(path)
    return rhino.load_plan(path)


def test_a_saved_plan_is_the_same(plan, loaded):
    assert (loaded.stages, loaded.pipeline) == (plan.stages, plan.pipeline)
    assert (loaded.inputs, loaded.outputs) == (plan.inputs, plan.outputs)
    assert loaded.places == (2, 1, 1) and loaded.table() == plan.table()


@pytest.mark.slow
def test_a_saved_plan_runs(loaded):
    step = loaded.jit(train_step, donate_argnums=(0, 1))
    assert_close(three_steps(step, *arguments()), three_steps_of_one_device())


def test_state_is_put_on_groups_and_made_there(plan):
    put = plan.put(arguments())
    leaves = zip(jax.tree.leaves(put), plan.inputs, strict=True)
    on = [(x.sharding.mesh, plan.stages[leaf.stage].mesh) for x, leaf in leaves]
    assert all(a == b for a, b in on) and len({a.shape_tuple for a, _ in on}) == 2
    made = plan.init(lambda: arguments()[:2])
    assert jax.tree.map(lambda x: x.sharding, made) == plan.in_shardings[:2]


@pytest.mark.slow
def test_tasks_of_every_group_are_compiled(plan):
    found = plan.verify(train_step, *arguments())
    assert found.ok and len(found.stages) == 3
    for planned_cost, compiled in found.stages:
        assert planned_cost.fixed_bytes == compiled.fixed_bytes


@pytest.mark.parametrize(
    ("changes", "expected_sizes"),
    covering(
        [
            ({"stages": [2, 2, 4]}, [2, 2, 4]),
            ({"stages": 1}, [8]),
            ({"microbatches": 8}, [4, 2, 2]),
            ({"stages": 2}, [4, 4]),
            ({"schedule": "gpipe"}, [4, 2, 2]),
            ({"pins": {"params['head']": jax.P(None, "x")}}, [4, 2, 2]),
        ],
        2,
    ),
    ids=str,
)
def test_a_changed_plan_has_the_groups_that_were_asked_for(
    plan, changes, expected_sizes
):
    assert sizes(plan.with_(**changes)) == expected_sizes


def test_an_evaluation_like_it_has_its_groups_and_moves_no_state(plan):
    params, _, batch = arguments()
    step = rhino.auto_shard(loss, like=plan)
    found = step.plan(params, batch)
    assert sizes(found) == [4, 2, 2]
    assert found.in_shardings[0] == plan.in_shardings[0]
    placed, _, rows = plan.put(arguments())
    got = step(placed, rows)
    np.testing.assert_allclose(got, loss(params, batch), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::rhino_jax.RhinoWarning")
def test_a_smaller_batch_has_the_same_groups():
    step = rhino.auto_shard(train_step, level="fast", **UNEQUAL)
    params, state, batch = arguments()
    first = step.plan(params, state, batch)
    second = step.plan(params, state, {k: x[:8] for k, x in batch.items()})
    assert sizes(first) == sizes(second) == [4, 2, 2]


@pytest.mark.slow
def test_a_sweep_compares_them_with_equal_groups():
    stages = [1, 2, [4, 2, 2]]
    found = rhino.sweep(
        train_step, *arguments(2), stages=stages, microbatches=[4], level="fast"
    )
    assert [sizes(point.plan()) for point in found] == [[8], [4, 4], [4, 2, 2]]
    assert "4 + 2 + 2" in found.table()


@pytest.mark.slow
def test_checkpoints_of_two_equal_groups_are_read(tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint")
    plan = planned(mesh={"stage": 2, "data": 4}, microbatches=4)
    placed = plan.put(arguments())
    params, state, first = plan.jit(train_step, donate_argnums=(0, 1))(*placed)
    with ocp.StandardCheckpointer() as saver:
        saver.save(tmp_path / "state", (params, state))
    shapes = jax.eval_shape(lambda: arguments()[:2])
    for options in (UNEQUAL, {"mesh": {"x": 8}}):
        other = planned(**options)
        wanted = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
            shapes,
            other.in_shardings[:2],
        )
        with ocp.StandardCheckpointer() as saver:
            params, state = saver.restore(tmp_path / "state", wanted)
        step, losses = other.jit(train_step, donate_argnums=(0, 1)), [np.asarray(first)]
        batch = other.put(arguments())[2]
        for _ in range(2):
            params, state, value = step(params, state, batch)
            losses.append(np.asarray(value))
        assert_close((params, state, losses), three_steps_of_one_device())
