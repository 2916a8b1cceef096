"""Top-k, positions and running sums along a sharded dim: shards are merged."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conv_programs import HARDWARE
from jax import lax
from jax.sharding import PartitionSpec as P

import rhino_jax as rhino
from tests.cases import covering


RNG = np.random.default_rng(0)
# Whole numbers, so that many are equal, and two that are none.
ROWS = RNG.integers(-5, 5, (4, 64)).astype(np.float32)
ROWS[0, 3] = ROWS[0, 40] = np.nan

AXES = ("y", "x"), ("x", "y"), ("y",)


def best(x: jax.Array) -> Any:
    return (
        [lax.top_k(x, k) for k in (5, 20, 64)],
        lax.top_k(x.T, 3, axis=0),
        lax.top_k(x[1], 9),
        lax.approx_max_k(jnp.sin(jnp.arange(256.0).reshape(4, 64)) + 0 * x, 6)[1],
        jnp.argmax(x, 1),
        jnp.argmin(x.astype(jnp.bfloat16), 1),
        jnp.argmax(x > 2, 1),
        jnp.argmax(x[2]),
        jax.random.categorical(jax.random.key(0), x[1:]),
    )


def running(x: jax.Array) -> Any:
    x = x[1:]
    return (
        jnp.cumsum(x, 1),
        jnp.cumsum(x.astype(jnp.int8), 1, dtype=jnp.int8),
        jnp.cumprod(x / 3, 1),
        lax.cummax(x, axis=1),
        lax.cummin(x, axis=1, reverse=True),
        lax.cumlogsumexp(x, axis=1),
        lax.cumlogsumexp(x, axis=1, reverse=True),
        jax.grad(lambda x: (jnp.sin(jnp.cumsum(x, 1)) * x).sum())(x),
        lax.scan(lambda c, _: (c * 0.9, jnp.cumsum(c, 1)[:, -1]), x, None, 3)[1],
    )


def gradient_of_best(x: jax.Array) -> jax.Array:
    x = jnp.where(x == x, x, 0) + jnp.arange(64) / 100
    return jax.grad(lambda x: jnp.sin(lax.top_k(x, 7)[0]).sum())(x)


@pytest.mark.parametrize(
    ("fn", "axes"),
    covering(
        itertools.product((best, running, gradient_of_best), AXES),
        zip((best, running, gradient_of_best), AXES, strict=True),
    ),
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_merged_shards_are_as_one_device(fn: Any, axes: tuple[str, ...]) -> None:
    step = rhino.auto_shard(
        fn, mesh={"x": 4, "y": 2}, hardware=HARDWARE, pins={"x": P(None, axes)}
    )
    want = jax.tree.leaves(jax.jit(fn)(ROWS))
    for got, value in zip(jax.tree.leaves(step(ROWS)), want, strict=True):
        np.testing.assert_allclose(
            np.asarray(got, np.float32), np.asarray(value, np.float32), rtol=1e-4
        )


def sampled(words: jax.Array, x: jax.Array, key: jax.Array) -> jax.Array:
    likely, at = lax.top_k(x @ words, 8)
    chosen = jax.random.categorical(key, likely)
    return jnp.take_along_axis(at, chosen[:, None], 1)[:, 0]


def test_a_sampler_merges_the_best_words_of_every_shard() -> None:
    shape = jax.ShapeDtypeStruct
    args = (
        shape((512, 131072), np.float32),
        shape((32, 512), np.float32),
        jax.eval_shape(lambda: jax.random.key(0)),
    )
    plan = rhino.plan(sampled, *args, mesh={"x": 8}, hardware="v5e:2x4")
    assert plan.in_specs[0] == P(None, "x")
    # Values and positions, of eight words from each of the seven other shards.
    assert {(c.kind, c.bytes) for c in plan.collectives} == {
        ("all-gather", 32 * 8 * 4 * 7)
    }
    assert sum(c.count for c in plan.collectives) == 2
    verified = plan.verify(sampled, *args, compile_for="cpu")
    assert verified.ok, verified.table()
