"""One state, several functions: `like=`, and new signatures of one function."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import rhino_jax as rhino
from rhino_jax.errors import InfeasiblePlanError, MeshError, RhinoError, RhinoWarning
from rhino_jax.ir.program import Input, Program, Region, Value
from rhino_jax.plan.kept import reused_specs
from tests.cases import covering
from tests.runtime.stand_in import shard
from tests.runtime.training import state, train_step


F = jax.ShapeDtypeStruct
MESH = {"x": 2, "y": 4}


def evaluate(params: Any, batch: Any) -> Any:
    hidden = jax.nn.relu(batch["x"] @ params["w1"] + params["b1"])
    return jnp.mean((hidden @ params["w2"] - batch["y"]) ** 2)


def batch_of(count: int) -> Any:
    rng = np.random.default_rng(count)
    shapes = {"x": (count, 16), "y": (count, 8)}
    return {k: rng.normal(size=s).astype(np.float32) for k, s in shapes.items()}


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return F(shape, jnp.float32)


def test_an_evaluation_like_a_train_step_moves_no_state() -> None:
    # Pins that nobody would choose: they must come from the train step.
    pins = {"params['w1']": P("y", "x"), "params['w2']": P(None, "y")}
    train = rhino.auto_shard(train_step, mesh=MESH, pins=pins, progress=False)
    loss_of = rhino.auto_shard(evaluate, like=train, progress=False)
    params, opt, batch = state()
    params, opt, _ = train(params, opt, batch)
    got = loss_of(params, batch)
    (bound,) = loss_of._bounds.values()
    assert bound.mesh is train.last_plan.mesh
    arguments = loss_of._match(bound, (params, batch), {})
    assert arguments is not None
    moved = [bound.traced.arguments.array_paths[i] for i in arguments.to_move]
    assert set(moved) <= {"batch['x']", "batch['y']"}
    kept = {k: x.sharding for k, x in params.items()}
    assert bound.plan.in_shardings[0] == kept
    assert bound.plan.pins == {}
    assert "like=`train_step`" in " ".join(bound.plan.notes)
    np.testing.assert_allclose(got, jax.jit(evaluate)(state_after(), batch), rtol=1e-5)


def state_after() -> Any:
    return jax.jit(train_step)(*state())[0]


def test_pins_win_over_like() -> None:
    like = rhino.plan(train_step, *state(), mesh=MESH, pins={"params*": P()})
    found = rhino.plan(
        evaluate, state()[0], batch_of(8), like=like, pins={"params['w1']": P("x")}
    )
    assert found.in_specs[0] == {"w1": P("x"), "b1": P(), "w2": P()}
    assert set(found.pins) == {"params['w1']"}


def test_like_takes_the_plan_of_a_file(tmp_path: Any) -> None:
    plan = rhino.plan(train_step, *state(), mesh=MESH, pins={"params['w1']": P("y")})
    plan.save(tmp_path / "plan.json")
    loaded = rhino.load_plan(tmp_path / "plan.json")
    found = rhino.plan(evaluate, state()[0], batch_of(8), like=loaded)
    assert found.in_specs[0] == plan.in_specs[0]
    assert found.mesh_axes == plan.mesh_axes


def test_like_needs_a_plan_a_plan_needs_to_be_one_and_meshes_agree() -> None:
    train = rhino.auto_shard(train_step, mesh=MESH)
    with pytest.raises(RhinoError, match="no plan yet"):
        rhino.plan(evaluate, state()[0], batch_of(8), like=train)
    with pytest.raises(RhinoError, match="must be a sharded function or a plan"):
        rhino.auto_shard(evaluate, like=jax.jit(train_step))
    plan = train.plan(*state())
    with pytest.raises(MeshError, match="different meshes"):
        rhino.plan(evaluate, state()[0], batch_of(8), like=plan, mesh={"x": 8})


def test_hardware_is_as_of_like() -> None:
    like = rhino.plan(train_step, *state(), hardware="v5e:4x4", mesh={"a": 4, "b": 4})
    found = rhino.plan(evaluate, state()[0], batch_of(64), like=like)
    assert found.hardware == "v5e:4x4"
    assert found.mesh_axes == (("a", 4), ("b", 4))


def test_an_error_names_like_where_it_is_in_the_way() -> None:
    def small(w: Any, x: Any) -> Any:
        return jnp.sum(w) + jnp.sum(x)

    shapes = f32(1024, 1024), f32(8)
    like = rhino.plan(small, *shapes, mesh={"x": 8}, pins={"w": P()})
    budget = 2**20
    with pytest.raises(InfeasiblePlanError) as error:
        rhino.plan(small, *shapes, like=like, memory_budget_bytes=budget)
    assert "like=`small`" in error.value.where
    assert "4.00 MiB" in error.value.numbers
    assert "without like=" in error.value.numbers
    with pytest.raises(InfeasiblePlanError) as error:
        rhino.plan(small, *shapes, like=like, memory_budget_bytes=1000)
    assert "like=" not in error.value.where


@pytest.mark.parametrize("counts", covering([(12, 64), (12, 6, 64, 3)], each=True))
def test_a_smaller_batch_keeps_mesh_and_state_and_says_so_once(
    counts: tuple[int, ...],
) -> None:
    pins = {"params['w1']": P("y", "x"), "opt_state['m']['w2']": P(None, "y")}
    train = rhino.auto_shard(train_step, mesh=MESH, pins=pins, progress=False)
    params, opt, _ = state()
    params, opt, _ = train(params, opt, batch_of(64))
    before = train.last_plan
    with pytest.warns(RhinoWarning, match="layout of the 7 arrays") as said:
        for count in counts:
            shardings = jax.tree.map(lambda x: x.sharding, (params, opt))
            params, opt, _ = train(params, opt, batch_of(count))
            assert jax.tree.map(lambda x: x.sharding, (params, opt)) == shardings
            assert train.last_plan.mesh is before.mesh
    assert len([w for w in said if w.category is RhinoWarning]) == 1
    assert len(train._bounds) == len({64, *counts})


def test_without_a_mesh_the_first_one_stays() -> None:
    def product(w: Any, x: Any) -> Any:
        return x @ w

    sharded = rhino.auto_shard(product, progress=False)
    first = sharded.plan(f32(64, 64), f32(4096, 64))
    with pytest.warns(RhinoWarning, match="planned again"):
        second = sharded.plan(f32(64, 64), f32(8, 64))
    assert second.mesh is first.mesh
    assert second.in_specs[0] == first.in_specs[0]
    sharded.clear_cache()
    assert sharded.last_plan is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        free = sharded.plan(f32(64, 64), f32(8, 64))
    assert not any("kept" in note for note in free.notes)


def test_what_does_not_fit_as_before_is_planned_freely() -> None:
    def scaled(w: Any, x: Any) -> Any:
        return jnp.sum(w) * x

    budget = 9 * 2**19
    sharded = rhino.auto_shard(
        scaled, mesh={"x": 8}, memory_budget_bytes=budget, progress=False
    )
    w = f32(1024, 1024)
    held = rhino.plan(scaled, w, f32(8), mesh={"x": 8}, pins={"w": P()})
    # As if the first plan had left the weight whole.
    sharded._planner, planner = lambda *_: held, sharded._planner
    sharded.plan(w, f32(8))
    sharded._planner = planner
    with pytest.warns(RhinoWarning, match="1 of 1 shared arrays"):
        found = sharded.plan(w, f32(1024, 1024))
    assert found.in_specs[0] != P()


def test_results_of_random_plans_stay_the_same_under_another_signature() -> None:
    step = shard(lambda x, w: x @ w, seed=3)
    with pytest.warns(RhinoWarning, match="planned again"):
        for count in (8, 16):
            x, w = np.ones((count, 8), np.float32), np.ones((8, 8), np.float32)
            np.testing.assert_allclose(step(x, w), x @ w)


def program(**shapes: tuple[int, ...]) -> Program:
    """Arguments alone; `__` stands for a key, as in `params__w`."""
    names = [k.split("__") for k in shapes]
    paths = [n[0] + "".join(f"['{key}']" for key in n[1:]) for n in names]
    values = tuple(Value(i, s, "float32") for i, s in enumerate(shapes.values()))
    inputs = tuple(Input(i, path) for i, path in enumerate(paths))
    return Program("p", values, (), inputs, (), Region((), (), ()))


def test_an_argument_of_another_name_is_told_by_its_structure() -> None:
    like = rhino.plan(
        train_step, *state(), mesh=MESH, pins={"params['w1']": P("x"), "opt*w1*": P()}
    )
    shapes = {"w1": (16, 32), "b1": (32,), "w2": (32, 8)}
    renamed = program(**{f"model__{k}": s for k, s in shapes.items()})
    specs = like.in_specs[0]
    found = reused_specs(like, renamed)
    # `params`, a whole argument, and not the momentum inside of `opt_state`.
    assert found[0] == ((0,), ())
    assert len(found) == 3 and specs["w1"] == P("x")
    momentum = program(**{f"m__{k}": s for k, s in shapes.items()})
    assert reused_specs(like, momentum)[0] == ((), ())
    other = program(**{f"model__{k}": s for k, s in (shapes | {"b1": (31,)}).items()})
    assert reused_specs(like, other) == {}
    part = program(model__w1=(16, 32), model__b1=(32,))
    assert reused_specs(like, part) == {}
    assert reused_specs(like, program(z=(32,))) == {}
    assert reused_specs(like, program(b1=(32,))).keys() == {0}


def test_parts_of_a_whole_state_are_told_either_way() -> None:
    def whole(state: Any, x: Any) -> Any:
        hidden = x @ state["params"]["w"] + state["stats"]["mean"]
        return {**state, "opt": state["opt"]}, hidden.sum()

    state = {
        "params": {"w": f32(16, 32), "b": f32(32)},
        "opt": {"w": f32(16, 32), "b": f32(32)},
        "stats": {"mean": f32(32), "count": f32(2)},
    }
    pins = {"state['params']['w']": P("x"), "state['stats']['mean']": P("y")}
    like = rhino.plan(whole, state, f32(8, 16), mesh=MESH, pins=pins)
    parts = program(
        variables__params__w=(16, 32), variables__params__b=(32,),
        variables__stats__mean=(32,), variables__stats__count=(2,),
    )  # fmt: skip
    found = reused_specs(like, parts)
    assert found[0] == ((0,), ()) and found[2] == ((1,),)
    assert len(found) == 4

    def part(params: Any, x: Any) -> Any:
        return x @ params["w"] + params["b"]

    pins = {"params['w']": P(None, "y")}
    like = rhino.plan(part, state["params"], f32(8, 16), mesh=MESH, pins=pins)
    whole_state = program(
        state__params__w=(16, 32), state__params__b=(32,),
        state__opt__w=(16, 32), state__opt__b=(32,), state__step=(2,),
    )  # fmt: skip
    found = reused_specs(like, whole_state)
    # The optimizer's moments look like parameters, but are called otherwise.
    assert found == {0: ((), (1,)), 1: found[1]}


def test_two_arguments_of_one_structure_are_ambiguous_unless_they_agree() -> None:
    def both(params: Any, ema: Any, x: Any) -> Any:
        return x @ params["w"] @ ema["w"]

    p = {"w": f32(16, 16)}
    wanted = program(model__w=(16, 16))
    for pins, count in (
        ({"params*": P("x"), "ema*": P("x")}, 1),
        ({"params*": P("x"), "ema*": P()}, 0),
    ):
        like = rhino.plan(both, p, p, f32(8, 16), mesh=MESH, pins=pins)
        assert len(reused_specs(like, wanted)) == count
