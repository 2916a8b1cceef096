"""The sharded function as a thing that is called."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec as P

from rhino_jax.apply.sharded import jit_with_plan
from rhino_jax.errors import (
    MeshError,
    PlanFileError,
    RhinoWarning,
    TraceError,
)
from tests.apply.stand_in import assert_close, mesh_of, normal, shard


def train_step(params: Any, opt_state: Any, batch: Any) -> Any:
    def loss_of(p: Any) -> Any:
        hidden = jax.nn.relu(batch["x"] @ p["w1"] + p["b1"])
        return jnp.mean((hidden @ p["w2"] - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(params)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, opt_state["m"], grads)
    params = jax.tree.map(lambda p, m: p - 0.1 * m, params, momentum)
    return params, {"m": momentum, "step": opt_state["step"] + 1}, loss


def state() -> tuple[Any, Any, Any]:
    params = {
        "w1": normal(0, 16, 32) * 0.2,
        "b1": jnp.zeros(32),
        "w2": normal(1, 32, 8) * 0.2,
    }
    opt = {"m": jax.tree.map(jnp.zeros_like, params), "step": jnp.int32(0)}
    batch = {"x": np.asarray(normal(2, 64, 16)), "y": np.asarray(normal(3, 64, 8))}
    return params, opt, batch


def shapes_of_state() -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state())


def expected(steps: int) -> Any:
    params, opt, batch = state()
    loss = None
    for _ in range(steps):
        params, opt, loss = jax.jit(train_step)(params, opt, batch)
    return params, opt, loss


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_three_steps_compile_once_and_equal_one_device(kind: AxisType) -> None:
    mesh = mesh_of(kind)
    step = shard(train_step, mesh=mesh, seed=1, donate_argnums=(0, 1))
    params, opt, batch = state()
    for _ in range(3):
        params, opt, loss = step(params, opt, batch)
    assert_close((params, opt, loss), expected(3))
    assert step._last is not None
    assert step._last.jitted._cache_size() == 1
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
    assert step._last is not None and step._last.jitted._cache_size() == 1


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

        bound.__dict__["jitted"] = broken
        step(params, jnp.float32(1))
    assert not params["w"].is_deleted()


def test_keyword_arguments_in_any_order() -> None:
    def fn(x: Any, *, scale: Any, shift: Any = 0.0) -> Any:
        return x * scale["a"] + shift

    step = shard(fn)
    x = normal(0, 8, 8)
    want = fn(x, scale={"a": jnp.float32(2)}, shift=x)
    assert_close(step(x, scale={"a": jnp.float32(2)}, shift=x), want)
    assert_close(step(x, shift=x, scale={"a": jnp.float32(2)}), want)
    assert step.count == 1
    plan = step.plan(x, scale={"a": jnp.float32(2)}, shift=x)
    assert [leaf.path for leaf in plan.inputs] == ["x", "scale['a']", "shift"]


def test_donated_by_name() -> None:
    step = shard(lambda x, y: x + y, donate_argnames="y")
    x, y = normal(0, 8, 8), normal(1, 8, 8)
    step(x, y=y)
    assert y.is_deleted() and not x.is_deleted()


@pytest.mark.parametrize("options", [{"static_argnums": 1}, {"static_argnames": "n"}])
def test_static_arguments_are_python_values(options: Any) -> None:
    def fn(x: Any, n: int, *, mode: str = "add") -> Any:
        assert isinstance(n, int)
        return x * n if mode == "mul" else x + n

    step = shard(fn, **options)
    x = normal(0, 8, 8)
    assert_close(step(x, 3), x + 3)
    assert_close(step(x, n=4, mode="mul"), x * 4)
    assert_close(step(x, 3), x + 3)
    assert step.count == 3 or step.count == 2


def test_bad_static_and_donated_arguments() -> None:
    with pytest.raises(TraceError, match="Did you mean 'batch'") as caught:
        shard(train_step, donate_argnames="bach")
    assert "fix" in str(caught.value)
    with pytest.raises(TraceError, match="both static and donated"):
        shard(train_step, static_argnums=0, donate_argnames="params")
    with pytest.raises(TraceError, match="no argument 7"):
        shard(train_step, donate_argnums=7)


class Model:
    """An ordinary class; its instances are static."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def apply(self, params: Any, x: Any) -> Any:
        return x @ params * self.scale


def test_methods() -> None:
    Model.sharded = shard(Model.apply)  # type: ignore[attr-defined]
    a, b = Model(2.0), Model(3.0)
    w, x = normal(0, 8, 8), normal(1, 8, 8)
    assert_close(a.sharded(w, x), x @ w * 2.0)  # type: ignore[attr-defined]
    assert_close(b.sharded(w, x), x @ w * 3.0)  # type: ignore[attr-defined]
    plan = a.sharded.plan(w, x)  # type: ignore[attr-defined]
    assert [leaf.path for leaf in plan.inputs] == ["params", "x"]
    assert a.sharded.__name__ == "apply"  # type: ignore[attr-defined]
    assert_close(shard(a.apply)(w, x), x @ w * 2.0)


def test_jitted_functions_keep_their_static_and_donated_arguments() -> None:
    @functools.partial(jax.jit, static_argnames="n", donate_argnums=0)
    def fn(x: Any, n: int) -> Any:
        assert isinstance(n, int)
        return x * n

    step = shard(fn)
    x = normal(0, 8, 8)
    step(x, n=3)
    assert x.is_deleted()


def test_captured_arrays_are_arguments_placed_once() -> None:
    table, other = normal(0, 512, 64), np.ones((8, 64), np.float32)

    def fn(x: Any) -> Any:
        return x @ table + other

    step = shard(fn, seed=5)
    x = normal(1, 8, 512)
    assert_close(step(x), fn(x), rtol=2e-4, atol=1e-4)
    (bound,) = step._bounds.values()
    assert [c.shape for c in bound.consts] == [(512, 64), (8, 64)]
    assert "dense<" not in "".join(
        line for line in step.lower(x).as_text().splitlines() if "512x64" in line
    )
    assert [c.sharding for c in bound.consts] == bound.const_shardings
    # They are copies: what happens to the original does not matter.
    table.delete()
    step(x)


def test_scalars_of_every_kind_compile_once() -> None:
    step = shard(lambda x, s: x * s)
    x = normal(0, 8, 8)
    for value in (2.0, 3.0, 4.0):
        assert_close(step(x, value), x * value)
    assert step.count == 1
    assert step._last is not None and step._last.jitted._cache_size() == 1
    assert_close(step(x, np.float32(2)), x * 2)
    assert_close(step(x, 2), x * 2)


def test_prng_keys_are_arguments_and_results() -> None:
    def fn(key: Any, x: Any) -> Any:
        key, sub = jax.random.split(key)
        return key, x + jax.random.normal(sub, x.shape)

    step = shard(fn, seed=2, donate_argnums=0)
    key, x = jax.random.key(3), jnp.zeros((8, 64))
    want_key, want = key, x
    for _ in range(2):
        want_key, want = jax.jit(fn)(want_key, want)
    for _ in range(2):
        key, x = step(key, x)
    assert_close((key, x), (want_key, want))
    assert step.count == 1


def test_other_shapes_are_planned_again_and_said_once() -> None:
    step = shard(lambda x: x * 2)
    step(normal(0, 8, 8))
    with pytest.warns(
        RhinoWarning, match=r"`x` is float32\[16,8\], was float32\[8,8\]"
    ):
        step(normal(0, 16, 8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(normal(0, 24, 8))
        step(normal(0, 8, 8))
    assert step.count == 3


def test_a_plan_is_reused_where_the_program_is_the_same() -> None:
    step = shard(lambda x, s: (x * 2, s))
    x = normal(0, 8, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(x, 2.0)
        step(x, jnp.float32(2.0))
    assert step.count == 1


def test_under_transformations_only_constraints_are_placed() -> None:
    def loss(w: Any, x: Any) -> Any:
        return jnp.sum(jnp.tanh(x @ w) ** 2)

    step = shard(loss, seed=1)
    w, x = normal(0, 8, 8), normal(1, 8, 8)
    assert_close(jax.grad(step)(w, x), jax.grad(loss)(w, x))
    assert_close(jax.jit(jax.grad(step))(w, x), jax.grad(loss)(w, x))
    assert_close(jax.hessian(step)(w, x), jax.hessian(loss)(w, x), atol=1e-4)
    many = jnp.stack([x, 2 * x, 3 * x])
    assert_close(jax.vmap(step, (None, 0))(w, many), jax.vmap(loss, (None, 0))(w, many))
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
    step = shard(train_step)
    compiled = step.lower(*shapes_of_state()).compile()
    assert_close(compiled(*state()), expected(1))
    assert compiled.memory_analysis() is not None
    params, opt, _ = state()
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
    assert "counter" in caught.value.fix


def test_a_leaked_tracer_is_jaxs_own_error() -> None:
    kept: list[Any] = []

    def fn(x: Any) -> Any:
        kept.append(x)
        return x + kept[0].sum()

    step = shard(fn)
    x = normal(0, 8, 8)
    step(x)
    with pytest.raises(jax.errors.UnexpectedTracerError):
        step(normal(0, 16, 8))


def test_unhashable_static_values() -> None:
    with pytest.raises(TraceError, match="has no hash"):
        shard(lambda x, n: x, static_argnums=1)(normal(0, 8, 8), [1])


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
    import dataclasses

    uneven = dataclasses.replace(
        plan, inputs=(dataclasses.replace(leaf, spec=((0, 1, 0), ())),)
    )
    with pytest.raises(PlanFileError, match="unevenly"):
        uneven.jit(lambda x: x * 2)(x)


def test_arrays_committed_elsewhere_are_moved() -> None:
    step = shard(train_step)
    params, opt, batch = state()
    other = Mesh(np.array(jax.devices()).reshape(8), ("z",))
    params = jax.device_put(params, NamedSharding(other, P()))
    opt = jax.device_put(opt, jax.devices()[3])
    assert_close(step(params, opt, batch), expected(1))


def test_no_arguments_and_no_results() -> None:
    assert_close(shard(lambda: jnp.ones((8, 8)))(), jnp.ones((8, 8)))
    assert shard(lambda x: None)(jnp.ones(8)) is None
