"""The sharded function as a thing that is called: meshes, results, donation, plans."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType

import rhino_jax as rhino
from rhino_jax.apply.with_plan import jit_with_plan
from rhino_jax.errors import PlanFileError
from tests.apply.stand_in import assert_close, mesh_of, normal, shard
from tests.apply.training import expected, state, train_step


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_three_steps_compile_once_and_equal_one_device(kind: AxisType) -> None:
    mesh = mesh_of(kind)
    step = shard(train_step, mesh=mesh, seed=1, donate_argnums=(0, 1))
    params, opt, batch = state()
    for _ in range(3):
        params, opt, loss = step(params, opt, batch)
    assert_close((params, opt, loss), expected(3))
    assert step._last is not None
    assert step._last.executable.jitted._cache_size() == 1
    assert step.count == 1
    assert {x.sharding.mesh for x in jax.tree.leaves((params, opt, loss))} == {mesh}


@pytest.mark.parametrize("seed", range(3))
def test_a_mesh_of_auto_and_explicit_axes(seed: int) -> None:
    kinds = (AxisType.Explicit, AxisType.Auto)
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=kinds)
    step = shard(train_step, mesh=mesh, seed=seed)
    params, opt, batch = state()
    for _ in range(2):
        params, opt, loss = step(params, opt, batch)
    assert_close((params, opt, loss), expected(2))
    assert step._last is not None and step._last.executable.jitted._cache_size() == 1


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("around", [AxisType.Auto, AxisType.Explicit])
def test_runs_within_any_mesh_context(kind: AxisType, around: AxisType) -> None:
    step = shard(train_step, mesh=mesh_of(kind), seed=2)
    with jax.set_mesh(mesh_of(around)):
        got = step(*state())
    assert_close(got, expected(1))


def test_results_have_the_planned_shardings() -> None:
    step = shard(train_step, seed=3)
    out = step(*state())
    plan = step.plan(*state())
    got = jax.tree.map(lambda x: x.sharding, out)
    assert got == plan.out_shardings
    # State comes out as it goes in, donated or not.
    assert plan.out_specs[0] == plan.in_specs[0]
    assert plan.out_specs[1] == plan.in_specs[1]


def test_donated_arrays_are_gone_and_others_stay() -> None:
    params, opt, batch = state()
    step = shard(train_step, donate_argnums=0)
    step(params, opt, batch)
    assert all(x.is_deleted() for x in jax.tree.leaves(params))
    assert not any(x.is_deleted() for x in jax.tree.leaves(opt))
    placed = jax.device_put(state()[0], step.plan(*state()).in_shardings[0])
    step(placed, opt, batch)
    assert all(x.is_deleted() for x in jax.tree.leaves(placed))


def test_donated_arrays_stay_when_the_run_fails() -> None:
    def bad(params: Any, x: Any) -> Any:
        return jax.tree.map(lambda p: p * x, params)

    step = shard(bad, donate_argnums=0)
    params = {"w": normal(0, 8, 8)}
    step.plan(params, jnp.float32(1))
    with pytest.raises(Exception, match="boom"):
        (bound,) = step._bounds.values()

        def broken(*_: Any) -> Any:
            raise ValueError("boom")

        bound.executable.__dict__["jitted"] = broken
        step(params, jnp.float32(1))
    assert not params["w"].is_deleted()


def test_debug_prints_stay(capfd: Any) -> None:
    def fn(x: Any) -> Any:
        jax.debug.print("total {t}", t=x.sum())
        return x * 2

    jax.block_until_ready(shard(fn)(jnp.ones((8, 8))))
    jax.effects_barrier()
    assert "total 64" in capfd.readouterr().out


def test_an_existing_plan_is_applied_to_its_function_only() -> None:
    step = shard(train_step, seed=4)
    plan = step.plan(*state())
    again = plan.jit(train_step)
    assert_close(again(*state()), expected(1))
    donating = jit_with_plan(train_step, plan, donate_argnums=(0, 1))
    params, opt, batch = state()
    donating(params, opt, batch)
    assert params["w1"].is_deleted()

    def other(params: Any, opt_state: Any, batch: Any) -> Any:
        return jax.tree.map(lambda p: p + 1, params)

    with pytest.raises(PlanFileError):
        plan.jit(other)(*state())


def test_a_plan_that_cuts_unevenly_is_refused() -> None:
    step = shard(lambda x: x * 2)
    x = normal(0, 8, 8)
    plan = step.plan(x)
    (leaf,) = plan.inputs
    uneven = dataclasses.replace(
        plan, inputs=(dataclasses.replace(leaf, spec=((0, 1, 0), ())),)
    )
    with pytest.raises(PlanFileError, match="unevenly"):
        uneven.jit(lambda x: x * 2)(x)


def test_a_plan_for_another_shape_is_refused_without_a_word_of_planning() -> None:
    x = jnp.ones((16, 8))
    run = rhino.plan(lambda x: x * 2, x, mesh={"d": 8}, progress=False).jit(
        lambda x: x * 2
    )
    run(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(rhino.PlanFileError, match=r"x is float32\[32,8\], was"):
            run(jnp.ones((32, 8)))
