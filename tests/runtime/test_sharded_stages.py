"""The sharded function traced, transformed, lowered; and what goes wrong there."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding

from rhino_jax.errors import MeshError, TraceError
from tests.runtime.stand_in import assert_close, mesh_of, normal, shard
from tests.runtime.training import (
    shapes_of_state,
    small_state,
    small_step,
    state,
    steps_of_one_device,
    train_step,
)


def test_under_transformations_only_constraints_are_placed() -> None:
    def loss(w: Any, x: Any) -> Any:
        return jnp.sum(jnp.tanh(x @ w) ** 2)

    step = shard(loss, seed=1)
    w, x = normal(0, 8, 8), normal(1, 8, 8)
    many = jnp.asarray(np.stack([x, 2 * x, 3 * x]))

    def transformed(fn: Any) -> Any:
        each = jax.vmap(fn, (None, 0))(w, many)
        return jax.grad(fn)(w, x), jax.hessian(fn)(w, x), each

    got, want = (jax.jit(transformed, static_argnums=0)(fn) for fn in (step, loss))
    assert_close(got, want, atol=1e-4)
    assert_close(got[::2], want[::2])
    assert_close(jax.grad(step)(w, x), want[0])
    names = str(jax.make_jaxpr(step)(w, x))
    assert "sharding_constraint" in names and "device_put" not in names


def test_transformed_on_an_explicit_mesh() -> None:
    def loss(w: Any, x: Any) -> Any:
        return jnp.sum(jnp.tanh(x @ w) ** 2)

    mesh = mesh_of(AxisType.Explicit)
    step = shard(loss, mesh=mesh)
    w, x = normal(0, 8, 8), normal(1, 8, 8)
    with jax.set_mesh(mesh):
        got = jax.jit(jax.grad(step))(w, x)
    assert_close(got, jax.grad(loss)(w, x))


def test_a_function_that_closes_over_tracers() -> None:
    x = normal(0, 8, 8)

    def outer(w: Any) -> Any:
        return jnp.sum(shard(lambda y: jnp.sin(y @ w))(x) ** 2)

    def plain(w: Any) -> Any:
        return jnp.sum(jnp.sin(x @ w) ** 2)

    w = normal(1, 8, 8)
    assert_close(jax.grad(outer)(w), jax.grad(plain)(w))


def test_called_inside_of_jit_with_arrays_of_outside() -> None:
    table = normal(0, 8, 8)
    step = shard(lambda x: x @ table)
    x = normal(1, 8, 8)
    assert_close(jax.jit(lambda: step(x))(), x @ table)
    assert_close(step(x), x @ table)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_an_abstract_mesh_plans_and_lowers_but_does_not_run(kind: AxisType) -> None:
    mesh = AbstractMesh((2, 4), ("x", "y"), axis_types=(kind,) * 2)
    step = shard(train_step, mesh=mesh, donate_argnums=(0, 1))
    shapes = shapes_of_state()
    assert step.plan(*shapes).mesh == mesh
    assert "sdy.sharding_constraint" in step.lower(*shapes).as_text()
    params, opt, batch = state()
    with pytest.raises(MeshError, match="8 devices are needed, 8 are here") as caught:
        step(params, opt, batch)
    assert "xla_force_host_platform_device_count=8" in caught.value.fix
    assert not params["w1"].is_deleted()


def test_lowered_compiles_and_runs() -> None:
    step, args = shard(small_step), small_state()
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
    compiled = step.lower(*shapes).compile()
    assert_close(compiled(*args), steps_of_one_device("small", 1))
    assert compiled.memory_analysis() is not None
    params, opt, _ = args
    with pytest.raises(TraceError, match="compiled for other arguments"):
        compiled(params, opt)


def test_stages_like_jit() -> None:
    step = shard(train_step)
    shapes = step.eval_shape(*state())
    assert shapes[0]["w1"].shape == (16, 32)
    assert isinstance(shapes[2].sharding, NamedSharding)
    assert step.trace(*state()).jaxpr is not None
    assert step.__wrapped__ is train_step and step.__name__ == "train_step"
    assert step.__doc__ == train_step.__doc__
    step.clear_cache()
    step.plan(*state())
    assert step.count == 2


def test_shapes_in_place_of_arrays() -> None:
    step = shard(train_step)
    with pytest.raises(TraceError, match="shape in place of an array") as caught:
        step(*shapes_of_state())
    assert caught.value.where == "params['b1']"


def test_the_users_own_error_comes_first() -> None:
    def broken(x: Any) -> Any:
        return x @ jnp.ones((5, 5))

    with pytest.raises(TypeError, match="dot_general") as caught:
        shard(broken)(normal(0, 8, 8))
    assert "traced `broken`" in caught.value.__notes__[-1]
    assert any(e.name == "broken" for e in caught.traceback)


def test_a_function_that_changes_from_trace_to_trace() -> None:
    calls: list[int] = []

    def fn(x: Any) -> Any:
        calls.append(1)
        for _ in calls:
            x = jnp.sin(x)
        return x

    step = shard(fn)
    step(normal(0, 8, 8))
    step.clear_cache()
    with pytest.raises(TraceError, match="traces to another program") as caught:
        step(normal(0, 8, 8))
    assert "`sin` -> float32[8,8]" in caught.value.numbers
    assert "counter" in caught.value.fix


def test_a_leaked_tracer_is_jaxs_own_error() -> None:
    class Kept:
        __slots__ = ("first",)  # nothing looks in here

    kept = Kept()

    def fn(x: Any) -> Any:
        if not hasattr(kept, "first"):
            kept.first = x
        return x + kept.first.sum()

    step = shard(fn)
    x = normal(0, 8, 8)
    step(x)
    with pytest.raises(jax.errors.UnexpectedTracerError):
        step(normal(0, 16, 8))
