"""Results that come back as arguments: seen, planned again once, and said once."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import rhino_jax as rhino
from rhino_jax.errors import RhinoWarning
from tests.runtime.stand_in import mesh_of, shard
from tests.runtime.training import small_state, small_step


MESH = {"a": 2, "b": 4}


def layer(x: Any, w: Any) -> Any:
    return jnp.tanh(x @ w)


def array(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def expected(x: Any, w: Any, count: int) -> Any:
    for _ in range(count):
        x = layer(x, w)
    return x


def sharded_layer() -> Any:
    pins = {"w": P(None, "b")}
    return rhino.auto_shard(layer, mesh=MESH, pins=pins, progress=False)


def test_a_result_that_comes_back_is_tied_at_its_first_return() -> None:
    sharded, x, w = sharded_layer(), array(0, 4096, 64), array(1, 64, 64) / 8
    y = sharded(x, w)
    first = sharded.last_plan
    assert first.out_specs != first.in_specs[0]
    with pytest.warns(RhinoWarning, match="`out` as `x`") as said:
        y = sharded(y, w)
    assert len(said) == 1
    second = sharded.last_plan
    assert second.out_specs == second.in_specs[0]
    assert second.in_specs[1] == P(None, "b")
    assert second.outputs[0].path == "out: x"
    assert second.mesh is first.mesh
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        placed = sharded._match(sharded._last, (y, jax.device_put(w)), {})
        assert 0 not in placed.to_move
        for _ in range(3):
            y = sharded(y, w)
    assert sharded.last_plan is second
    assert len(sharded._bounds) == 1
    np.testing.assert_allclose(y, expected(x, w, 5), rtol=1e-4, atol=1e-5)


def test_other_arrays_of_the_same_shape_are_no_feedback() -> None:
    sharded, x, w = sharded_layer(), array(0, 4096, 64), array(1, 64, 64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in range(3):
            # A copy is not what was given.
            y = sharded(x, w)
            x = array(seed, 4096, 64)
            sharded(jnp.array(y), w)
    assert sharded.last_plan.out_specs != sharded.last_plan.in_specs[0]


def test_pins_of_both_ends_stay_and_nothing_is_said() -> None:
    pins = {"x": P("a"), "out": P(None, "b")}
    doubled = rhino.auto_shard(lambda x: x * 2, mesh=MESH, pins=pins, progress=False)
    x = array(0, 64, 64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        y = doubled(doubled(doubled(x)))
    assert doubled.last_plan.in_specs == (P("a"),)
    assert y.sharding.spec == P(None, "b")
    np.testing.assert_allclose(y, 8 * x)


def test_ordinary_loops_are_planned_once() -> None:
    sharded = shard(small_step, mesh=mesh_of(sizes=(1, 2)), seed=5)
    params, opt, batch = small_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            params, opt, _ = sharded(params, opt, batch)
    assert sharded.count == 1


def test_a_given_plan_stays_as_it_is() -> None:
    x, w = array(0, 4096, 64), array(1, 64, 64)
    plan = sharded_layer().plan(x, w)
    run = plan.jit(layer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        y = run(run(run(x, w), w), w)
    assert y.sharding == plan.out_shardings


def test_a_donated_argument_is_tied_from_the_start() -> None:
    pins = {"w": P(None, "b")}
    sharded = rhino.auto_shard(
        layer, mesh=MESH, pins=pins, donate_argnums=0, progress=False
    )
    plan = sharded.plan(array(0, 4096, 64), array(1, 64, 64))
    assert plan.out_specs == plan.in_specs[0]
