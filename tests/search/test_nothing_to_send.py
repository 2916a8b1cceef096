"""Axes of one device and dead code: neither planned nor priced nor reported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import rhino_jax as rhino
from rhino_jax.frontend.trace import trace
from rhino_jax.models import registry


def plan_on(mesh: Mapping[str, int], **pins: P) -> rhino.Plan:
    work = registry.get("mlp-tiny", batch=65536)
    args = work.abstract_args()
    return rhino.plan(work.step, *args, mesh=mesh, hardware="v5e:2x4", **pins)


@pytest.fixture(scope="module")
def plain() -> rhino.Plan:
    return plan_on({"data": 8})


@pytest.mark.parametrize(
    "mesh",
    [
        {"data": 8, "model": 1},
        {"replica": 1, "data": 8},
        {"replica": 1, "data": 8, "model": 1, "expert": 1},
    ],
)
def test_axes_of_one_device_change_nothing(
    mesh: dict[str, int], plain: rhino.Plan
) -> None:
    plan = plan_on(mesh)
    assert plan.predicted == plain.predicted
    assert plan.in_specs == plain.in_specs
    assert plan.mesh_axes == tuple(mesh.items())
    assert {axis for c in plan.collectives for axis in c.axes} == {"data"}
    assert [(c.kind, c.bytes) for c in plan.collectives] == [
        (c.kind, c.bytes) for c in plain.collectives
    ]
    assert plan.recipes.keys() == plain.recipes.keys()
    for name, predicted in plain.recipes.items():
        assert plan.recipes[name] == predicted, name


def test_pins_over_axes_of_one_device_send_nothing() -> None:
    def fn(x: Any, w: Any) -> Any:
        return jnp.tanh(x @ w)

    shape = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    plan = rhino.plan(
        fn, shape, shape, mesh={"data": 8, "model": 1}, hardware="cpu:8",
        pins={"x": P("data", "model"), "w": P("model", None)},
    )  # fmt: skip
    assert not plan.collectives
    assert plan.in_specs == (P("data"), P())
    compiled = plan.verify(fn, shape, shape, compile_for="cpu")
    assert compiled.ok and not compiled.collectives


def with_dead_code(x: jax.Array, w: jax.Array) -> jax.Array:
    """The loss of a gradient is never used, nor is the sum in the loop."""

    def loss(w: jax.Array) -> jax.Array:
        return jnp.sum(jnp.tanh(x @ w) ** 2)

    def body(carry: Any, _: None) -> Any:
        y, total = carry
        return (jnp.tanh(y), total + jnp.sum(y)), None

    (y, _), _ = jax.lax.scan(body, (x, 0.0), None, length=3)
    return jax.grad(loss)(w) + y[:1].sum()


def test_dead_code_sends_nothing() -> None:
    x, w = jnp.ones((64, 32)) / 7, jnp.ones((32, 16)) / 5
    pins = {"x": P(None, "m"), "w": P(None, None), "out": P(None, None)}
    mesh = {"m": 8}
    plan = rhino.plan(
        lambda x: (jnp.sum(x * x), x * 2)[1], x, mesh=mesh, hardware="cpu:8",
        pins={"x": P("m"), "out": P("m")},
    )  # fmt: skip
    assert not plan.collectives
    program = trace(with_dead_code, (x, w), {}).program
    names = [op.name for op in program.ops]
    assert names.count("reduce_sum") == 1
    plan = rhino.plan(with_dead_code, x, w, mesh=mesh, hardware="cpu:8", pins=pins)
    verified = plan.verify(with_dead_code, x, w, compile_for="cpu")
    assert verified.ok, verified.table()


def test_programs_with_dead_code_compute_the_same() -> None:
    x, w = jnp.ones((64, 32)) / 7, jnp.ones((32, 16)) / 5
    found = rhino.auto_shard(with_dead_code)(x, w)
    np.testing.assert_allclose(found, with_dead_code(x, w), rtol=1e-5)


def test_what_prints_stays(capfd: pytest.CaptureFixture[str]) -> None:
    def fn(x: jax.Array) -> jax.Array:
        jax.debug.callback(lambda s: print("sum", float(s)), jnp.sum(x))
        return x * 2

    rhino.auto_shard(fn)(jnp.ones((8,))).block_until_ready()
    jax.effects_barrier()
    assert "sum 8.0" in capfd.readouterr().out


def test_devices_that_stay_idle_are_noted() -> None:
    def fn(x: jax.Array) -> jax.Array:
        return x @ x.T

    shape = jax.ShapeDtypeStruct((48, 48), jnp.float32)
    plan = rhino.plan(fn, shape, mesh={"data": 3, "model": 4}, hardware="v5e:4x4")
    (note,) = [n for n in plan.notes if "idle" in n]
    assert "12 devices, v5e:4x4 16: 4 stay idle" in note
    full = rhino.plan(fn, shape, mesh={"data": 4, "model": 4}, hardware="v5e:4x4")
    chosen = rhino.plan(fn, shape, hardware="v5e:2x4")
    assert not any("idle" in n for n in (*full.notes, *chosen.notes))
