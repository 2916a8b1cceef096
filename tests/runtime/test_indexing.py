"""Index ops at the edges of sharded dims."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import rhino_jax as rhino
from tests.runtime.stand_in import assert_close


ROWS, WIDTH = 64, 4


def write(cache: Any, row: Any, start: Any) -> Any:
    starts = start, jnp.zeros_like(start)
    return lax.dynamic_update_slice(
        cache, row[None], starts, allow_negative_indices=False
    )


def gradients_and_loop(cache: Any, row: Any, start: Any) -> Any:
    """The gradients of a write, and writes of a loop that runs past the end."""

    def step(carry: Any, scale: Any) -> Any:
        cache, start = carry
        return (write(cache, scale * row, start), start + 13), cache[0] @ row

    gradient = jax.grad(lambda c, r: jnp.sin(write(c, r, start)).sum(), (0, 1))
    return gradient(cache, row), lax.scan(step, (cache, start), jnp.arange(6.0))


@pytest.mark.parametrize(
    ("fn", "places"),
    [
        (write, [np.uint8(3), np.uint8(ROWS), np.uint8(200)]),
        (gradients_and_loop, [np.int32(p) for p in (-70, 3, ROWS, 2**31 - 99)]),
    ],
)
def test_a_write_outside_of_a_sharded_dim_is_clamped(fn: Any, places: Any) -> None:
    rng = np.random.default_rng(0)
    cache, row = (rng.normal(size=n).astype("f") for n in ((ROWS, WIDTH), WIDTH))
    pins = {"cache": jax.P("x")}
    sharded = rhino.auto_shard(fn, mesh={"x": 8}, pins=pins, progress=False)
    whole = jax.jit(fn)
    for place in places:
        assert_close(sharded(cache, row, place), whole(cache, row, place))


def read(cache: Any, start: Any) -> Any:
    return rhino.pin(lax.dynamic_slice_in_dim(cache, start, ROWS // 2), jax.P("x"))


@pytest.mark.parametrize("fn", [read, jax.grad(lambda c, s: jnp.sin(read(c, s)).sum())])
def test_a_slice_outside_of_a_dim_is_clamped_if_its_rows_are_sharded(
    fn: Any,
) -> None:
    cache = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype("f")
    sharded, whole = rhino.auto_shard(fn, mesh={"x": 8}, progress=False), jax.jit(fn)
    for place in map(np.int32, (-70, -3, 3, ROWS // 2, ROWS - 5, ROWS)):
        assert_close(sharded(cache, place), whole(cache, place))


def test_a_write_at_one_index_leaves_the_other_shards_of_a_replicated_array() -> None:
    def add(array: Any, place: Any) -> Any:
        return rhino.pin(array.at[place].add(1.0), jax.P("x"))

    array = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype("f")
    pins = {"array": jax.P()}
    sharded = rhino.auto_shard(add, mesh={"x": 8}, pins=pins, progress=False)
    for place in map(np.int32, (-3, 0, 3, ROWS - 1, ROWS + 1)):
        assert_close(sharded(array, place), jnp.asarray(array).at[place].add(1.0))


def test_the_gradient_of_a_pooling_runs_with_rows_sharded() -> None:
    def pooled(x: Any) -> Any:
        return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2), (1, 2), "VALID").sum()

    x = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype("f")
    pins = {"x": jax.P("x")}
    sharded = rhino.auto_shard(
        jax.grad(pooled), mesh={"x": 8}, pins=pins, progress=False
    )
    assert_close(sharded(x), jax.grad(pooled)(x))
