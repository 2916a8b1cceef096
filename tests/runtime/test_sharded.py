"""The sharded function as a thing that is called: meshes, results, donation, plans."""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import rhino_jax as rhino
from rhino_jax.errors import PlanFileError, TraceError
from rhino_jax.runtime.sharded import jit_with_plan
from tests.cases import covering
from tests.runtime.stand_in import assert_close, mesh_of, normal, shard
from tests.runtime.training import PROGRAMS, steps_of_one_device


@pytest.mark.parametrize(
    ("name", "kind"),
    covering(
        itertools.product(PROGRAMS, [AxisType.Auto, AxisType.Explicit]),
    ),
)
def test_three_steps_compile_once_and_equal_one_device(
    name: str, kind: AxisType
) -> None:
    mesh, (fn, make) = mesh_of(kind), PROGRAMS[name]
    step = shard(fn, mesh=mesh, seed=1, donate_argnums=(0, 1))
    params, opt, batch = make()
    for _ in range(3):
        params, opt, loss = step(params, opt, batch)
    assert_close((params, opt, loss), steps_of_one_device(name, 3))
    assert step._last is not None
    assert step._last.executable.jitted._cache_size() == 1
    assert step.count == 1
    assert {x.sharding.mesh for x in jax.tree.leaves((params, opt, loss))} == {mesh}


@pytest.mark.parametrize(
    ("name", "seed"),
    covering(
        [("small", 0), *(("mlp", seed) for seed in range(3))],
        [("small", 0)],
    ),
)
def test_a_mesh_of_auto_and_explicit_axes(name: str, seed: int) -> None:
    kinds = (AxisType.Explicit, AxisType.Auto)
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=kinds)
    fn, make = PROGRAMS[name]
    step = shard(fn, mesh=mesh, seed=seed)
    params, opt, batch = make()
    for _ in range(2):
        params, opt, loss = step(params, opt, batch)
    assert_close((params, opt, loss), steps_of_one_device(name, 2))
    assert step._last is not None and step._last.executable.jitted._cache_size() == 1


@pytest.mark.parametrize(
    ("name", "around", "kind"),
    covering(
        itertools.product(PROGRAMS, *2 * [[AxisType.Auto, AxisType.Explicit]]),
        lambda case: case[0] == "small" and case[1] != case[2],
    ),
)
def test_runs_within_any_mesh_context(
    name: str, around: AxisType, kind: AxisType
) -> None:
    fn, make = PROGRAMS[name]
    step = shard(fn, mesh=mesh_of(kind), seed=2)
    with jax.set_mesh(mesh_of(around)):
        got = step(*make())
    assert_close(got, steps_of_one_device(name, 1))


@pytest.mark.parametrize("name", covering(PROGRAMS))
def test_results_have_the_planned_shardings(name: str) -> None:
    fn, make = PROGRAMS[name]
    step = shard(fn, seed=3)
    out = step(*make())
    plan = step.plan(*make())
    got = jax.tree.map(lambda x: x.sharding, out)
    assert got == plan.out_shardings
    # State comes out as it goes in, donated or not.
    assert plan.out_specs[0] == plan.in_specs[0]
    assert plan.out_specs[1] == plan.in_specs[1]


def doubled(params: Any, x: Any) -> Any:
    return jax.tree.map(lambda p: p * 2, params), x["a"] + params["w"]


def test_donated_arrays_are_gone_and_others_stay() -> None:
    def arguments() -> Any:
        params = {"w": normal(0, 8, 8), "b": normal(1, 8)}
        return params, {"a": normal(2, 8, 8)}

    params, x = arguments()
    step = shard(doubled, donate_argnums=0)
    step(params, x)
    assert all(a.is_deleted() for a in jax.tree.leaves(params))
    assert not x["a"].is_deleted()
    placed = jax.device_put(arguments()[0], step.plan(*arguments()).in_shardings[0])
    step(placed, x)
    assert all(a.is_deleted() for a in jax.tree.leaves(placed))


@pytest.mark.parametrize("is_placed", [False, True])
def test_deleted_arrays_are_named_before_anything_runs(is_placed: bool) -> None:
    """On several CPU devices one such buffer ends the process (jaxlib 0.10.2)."""
    params, x = {"w": normal(0, 8, 8), "b": normal(1, 8)}, {"a": normal(2, 8, 8)}
    step = shard(doubled, donate_argnums=0)
    gone, placed = jax.device_put((params, x), step.plan(params, x).in_shardings)
    x = placed if is_placed else jax.tree.map(np.asarray, x)
    step(gone, x)
    with pytest.raises(TraceError, match="is given deleted arrays") as caught:
        step(gone, x)
    assert caught.value.where in ("params['w']", "params['b']")


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
    args = {"w": normal(0, 8, 8), "b": normal(1, 8)}, {"a": normal(2, 8, 8)}
    expected = doubled(*args)
    plan = shard(doubled, seed=4).plan(*args)
    assert_close(plan.jit(doubled)(*args), expected)
    jit_with_plan(doubled, plan, donate_argnums=(0, 1))(*args)
    assert args[0]["w"].is_deleted()

    def other(params: Any, x: Any) -> Any:
        return jax.tree.map(lambda p: p + 1, params)

    with pytest.raises(PlanFileError):
        plan.jit(other)({"w": normal(0, 8, 8), "b": normal(1, 8)}, args[1])


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
