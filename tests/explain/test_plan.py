from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec as P

import rhino_jax as rhino
from rhino_jax.errors import MeshError
from rhino_jax.plan import plan as data
from rhino_jax.plan.files.schema import plan_from_dict, plan_to_dict
from rhino_jax.plan.plan import Leaf
from tests.plan.samples import Moments, sample_plan


def test_in_specs_are_shaped_like_the_positional_arguments() -> None:
    params, opt_state, batch = sample_plan().in_specs
    assert params == {"w1": P(None, "model"), "w2": P("model"), "act": None}
    assert opt_state == [
        Moments(P(), {"w1": P("data", "model"), "w2": P(("model", "data"))}),
        None,
    ]
    assert batch == P("data")


def test_in_specs_hold_keyword_arguments_where_there_are_any() -> None:
    tree = jax.tree.structure(((1,), {"mask": 2}))
    plan = sample_plan(
        in_tree=tree,
        in_leaf_positions=(0, 1),
        inputs=(
            Leaf("x", (8,), "float32", ((0,),), 8),
            Leaf("mask", (8,), "bool", ((),), 8),
        ),
    )
    assert plan.in_specs == ((P("data"),), {"mask": P()})


def test_constants_are_no_part_of_in_specs() -> None:
    plan = sample_plan()
    const = Leaf("const", (8,), "float32", ((0,),), 8)
    with_const = sample_plan(inputs=(*plan.inputs, const))
    assert with_const.in_specs == plan.in_specs


def test_out_specs_are_shaped_like_the_result() -> None:
    params, loss = sample_plan().out_specs
    assert params == {"w1": P(None, "model"), "w2": P("model"), "act": None}
    assert loss == P()


def test_shardings_need_a_mesh() -> None:
    with pytest.raises(MeshError) as error:
        _ = sample_plan().in_shardings
    assert "data=4, model=2" in error.value.numbers
    assert "plan.with_mesh(jax.make_mesh((4, 2), ('data', 'model')))" in str(
        error.value
    )


def test_shardings_on_a_concrete_mesh_place_arrays() -> None:
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    plan = sample_plan().with_mesh(mesh)
    sharding = plan.in_shardings[2]
    assert sharding == NamedSharding(mesh, P("data"))
    x = jax.device_put(jax.numpy.zeros((64, 128)), sharding)
    assert x.addressable_shards[0].data.shape == (16, 128)
    assert plan.out_shardings[1].spec == P()


def test_shardings_on_an_abstract_mesh() -> None:
    mesh = AbstractMesh((4, 2), ("data", "model"))
    assert sample_plan().with_mesh(mesh).in_shardings[2].spec == P("data")


@pytest.mark.parametrize(
    ("sizes", "names"),
    [((2, 4), ("data", "model")), ((4, 2), ("x", "model")), ((8,), ("data",))],
)
def test_with_mesh_refuses_other_axes(sizes, names) -> None:
    with pytest.raises(MeshError, match="planned for data=4, model=2"):
        sample_plan().with_mesh(AbstractMesh(sizes, names))


def test_str_is_one_line_that_tells_the_essentials() -> None:
    for text in (str(sample_plan()), repr(sample_plan())):
        assert "\n" not in text
        for word in ("train_step", "data=4 × model=2", "v5e", "12.3 ms", "3.00 GiB"):
            assert word in text
        assert "gap 0.8 %" in text and "optimal" in text


def test_plans_are_equal_by_what_they_hold() -> None:
    plan = sample_plan()
    held = plan_from_dict(plan_to_dict(plan))
    assert type(held) is data.PlanData and isinstance(plan, data.PlanData)
    assert held == plan and rhino.Plan.of(held) == held
    assert rhino.Plan.of(plan) is plan
    other = sample_plan(hardware="h100")
    assert held != other and plan != other and plan != "a plan"


def test_the_stage_is_on_the_mesh_of_the_plan() -> None:
    plan = sample_plan()
    (stage,) = plan.stages
    assert stage.mesh is None and stage.mesh_axes == plan.mesh_axes
    assert stage.devices == tuple(range(8)) and stage.sends == ()
    mesh = AbstractMesh((4, 2), ("data", "model"))
    assert plan.with_mesh(mesh).stages[0].mesh is mesh


def step(params: Any, batch: Any) -> Any:
    loss, grads = jax.value_and_grad(lambda w: jnp.mean((batch @ w) ** 2))(params)
    return params - 0.1 * grads, loss


def test_every_plan_that_users_get_acts(tmp_path: Path) -> None:
    args = (jnp.ones((16, 8)), jnp.ones((32, 16)))
    mesh = {"data": 8}
    sharded = rhino.auto_shard(step, mesh=mesh, progress=False)
    sharded(*args)
    plan = sharded.plan(*args)
    plan.save(tmp_path / "plan.json")
    together = rhino.plan_together(
        {"train": (step, args), "again": (step, args)}, mesh=mesh, progress=False
    )
    ran = plan.jit(step)
    ran(*args)
    for found in (
        plan,
        sharded.last_plan,
        rhino.plan(step, *args, mesh=mesh, progress=False),
        rhino.load_plan(tmp_path / "plan.json"),
        together["train"],
        ran.last_plan,
        plan.with_mesh(plan.mesh),
        pickle.loads(pickle.dumps(plan)),
    ):
        assert type(found) is rhino.Plan
        (stage,) = found.stages
        assert stage.mesh is found.mesh and stage.predicted == found.predicted
        assert found.transforms == plan.transforms
        assert "data=8" in str(found)
    assert isinstance(plan.verify(step, *args), rhino.Verification)
    assert isinstance(plan.check(step, *args), rhino.Check)
