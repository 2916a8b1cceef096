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
