"""Donated arrays: twice is refused, and those that are moved stay with the user."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import rhino_jax as rhino
from rhino_jax.runtime import bound
from rhino_jax.runtime.processes import across
from tests.runtime.stand_in import mesh_of


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
    with pytest.raises(rhino.TraceError, match="allocated once"):
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
    # Fed back in their places, and one of them a second time.
    with pytest.raises(rhino.TraceError, match="donated as"):
        step(a, b, a)


def test_state_that_goes_round_is_not_read_leaf_by_leaf(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Reading the type of one array takes microseconds, of a thousand milliseconds."""
    a, b = placed()[0], placed()[0]
    x, sharding = placed()
    a, b = step(a, b, x)
    read: list[Any] = []
    types = bound.array_type
    monkeypatch.setattr(bound, "array_type", lambda x: (read.append(x), types(x))[1])
    for batch in (
        jax.device_put(x, NamedSharding(sharding.mesh, sharding.spec)),
        np.ones((64, 64), np.float32),
        jnp.ones((64, 64)),
    ):
        a, b = step(a, b, batch)
    assert [type(x) for x in read] == [np.ndarray, type(x)]
    assert a[0, 0] == 5 and b[0, 0] == 16
    narrow = jnp.ones((64, 64), jnp.bfloat16)
    with pytest.warns(rhino.RhinoWarning, match="`x` is bfloat16"):
        assert step(a, b, narrow)[0].dtype == jnp.float32
    assert step.last_plan.inputs[-1].dtype == "bfloat16"


def test_arrays_of_one_device_are_sliced_on_the_host_and_do_not_change() -> None:
    specs = [P("x"), P("x", "y"), P(None, ("y", "x"))]
    kinds = ["float32", "bfloat16", "int4", "bool", "complex64"]
    whole = np.random.default_rng(0).integers(-2, 2, (8, 16))
    given = [jax.device_put(whole.astype(jnp.dtype(k))) for k in kinds for _ in specs]
    want = [NamedSharding(mesh_of(), spec) for spec in specs * len(kinds)]
    events: list[str] = []

    def listen(event: str, seconds: float, **_: Any) -> None:
        events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        moved = across.placed(given, want)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert not [event for event in events if "backend_compile" in event]
    # NumPy has neither weak types nor keys.
    given += [jnp.full((8,), 1.5), jax.random.split(jax.random.key(0), 8)]
    want += [NamedSharding(mesh_of(), P("x"))] * 2
    moved += across.placed(given[-2:], want[-2:])
    zeroed = jax.jit(lambda x: x * 0, donate_argnums=0)
    for i, (x, y, sharding) in enumerate(zip(given, moved, want, strict=True)):
        assert y.sharding == sharding and y.committed
        assert y.dtype == x.dtype and y.aval.weak_type == x.aval.weak_type
        if i == len(given) - 1:
            x, y = map(jax.random.key_data, (x, y))
        before = np.array(x, copy=True)
        np.testing.assert_array_equal(np.asarray(y), before)
        if i < len(specs):
            jax.block_until_ready(zeroed(y))
            np.testing.assert_array_equal(np.asarray(x), before)
