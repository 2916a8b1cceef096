"""An array that is donated twice is refused before anything runs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import rhino_jax as rhino


@rhino.auto_shard(mesh={"d": 8}, donate_argnums=(0, 1), progress=False)
def step(a: Any, b: Any, x: Any) -> Any:
    return a + x, b * 2


def placed() -> Any:
    x = jnp.ones((64, 64))
    sharding = step.plan(x, x, x).in_shardings[0]
    return jax.device_put(jnp.ones((64, 64)), sharding), sharding


def test_the_same_array_twice() -> None:
    x = jnp.ones((64, 64))
    there, _ = placed()
    for array in (jnp.ones((64, 64)), there):
        with pytest.raises(rhino.TraceError, match="donated as `a` and donated as `b`"):
            step(array, array, x)
        with pytest.raises(rhino.TraceError, match="donated as `b` and passed as `x`"):
            step(x + 1, array, array)
        assert not array.is_deleted()


def test_two_arrays_with_one_memory() -> None:
    array, sharding = placed()
    shards = [shard.data for shard in array.addressable_shards]
    other = jax.make_array_from_single_device_arrays(array.shape, sharding, shards)
    assert other is not array
    with pytest.raises(rhino.TraceError, match="held once"):
        step(array, other, jnp.ones((64, 64)))
    assert not array.is_deleted()


def test_what_is_not_donated_may_come_twice() -> None:
    double = rhino.auto_shard(lambda x, y: x + y, mesh={"d": 8}, progress=False)
    x = jnp.ones((64, 64))
    assert double(x, x)[0, 0] == 2


def test_state_goes_round() -> None:
    x = jnp.ones((64, 64))
    a, b = x + 0, x + 0
    for _ in range(3):
        a, b = step(a, b, x)
    assert a[0, 0] == 4 and b[0, 0] == 8
    with pytest.raises(rhino.TraceError, match="donated as"):
        step(a, a, x)
