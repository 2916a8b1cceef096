"""What runs a plan, apart from whoever calls it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh

from rhino_jax.frontend.trace import Traced, trace
from rhino_jax.runtime.spmd import Executable, executable_of
from tests.runtime.stand_in import plan_of, random_decisions


OFFSET = np.arange(16.0, dtype=np.float32)


def step(w: Any, x: Any) -> Any:
    y = jnp.tanh(x @ w) + OFFSET
    return {"y": y, "sum": y.sum()}


def made(mesh: Any) -> tuple[Traced, Executable]:
    w, x = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((8, 16), (32, 8)))
    traced = trace(step, (w, x), {})
    plan = plan_of(traced, mesh, random_decisions(traced.program, 3))
    return traced, executable_of(traced, plan, mesh)


@pytest.fixture
def mesh() -> Any:
    kinds = (jax.sharding.AxisType.Auto,) * 2
    return jax.make_mesh((4, 2), ("a", "b"), axis_types=kinds)


def arrays() -> list[Any]:
    keys = jax.random.split(jax.random.key(0))
    shapes = ((8, 16), (32, 8))
    return [jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True)]


def test_it_runs_flat_arrays_and_gives_them_where_it_says(mesh: Any) -> None:
    traced, executable = made(mesh)
    everything = [*arrays(), *traced.consts]
    expected = jax.tree.leaves(step(*arrays()))
    placed = [
        jax.device_put(x, s)
        for x, s in zip(everything, executable.in_shardings, strict=True)
    ]
    assert executable.is_runnable
    compiled = executable.lower(
        [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for x in placed]
    ).compile()
    again = [jax.device_put(np.asarray(x), x.sharding) for x in placed]
    for outs in (executable.run(placed), executable.run(again, compiled)):
        for got, want in zip(outs, expected, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
        assert [x.sharding for x in outs] == list(executable.out_shardings)


def test_it_runs_inside_of_a_trace(mesh: Any) -> None:
    traced, executable = made(mesh)
    outs = jax.jit(lambda *a: executable.run_staged([*a, *traced.consts]))(*arrays())
    for got, want in zip(outs, jax.tree.leaves(step(*arrays())), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_it_lowers_where_there_are_no_devices() -> None:
    traced, executable = made(AbstractMesh((4, 2), ("a", "b")))
    assert not executable.is_runnable
    shapes = [
        jax.ShapeDtypeStruct(x.shape, x.dtype)
        for x in (*traced.arguments.arrays, *traced.consts)
    ]
    assert "sdy.mesh" in executable.lower(shapes).as_text()
