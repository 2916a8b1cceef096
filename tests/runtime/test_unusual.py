"""Things that functions do which no example does."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, PartitionSpec as P

import rhino_jax as rhino
from tests.cases import covering
from tests.runtime.stand_in import SIZES, assert_close, mesh_of, normal, shard


def mapped(x: Any, w: Any) -> Any:
    def per_shard(a: Any, b: Any) -> Any:
        return jax.lax.psum(a @ b, "y")

    specs = (P(None, "y"), P("y", None))
    return jax.shard_map(
        per_shard, mesh=mesh_of(), in_specs=specs, out_specs=P()
    )(jnp.sin(x), w)  # fmt: skip


def in_context(x: Any, w: Any) -> Any:
    return jax.lax.with_sharding_constraint(x @ w, P("x")) + 1


def referenced(x: Any, w: Any) -> Any:
    ref = jax.new_ref(x)

    def body(_: Any, carry: Any) -> Any:
        ref[...] = ref[...] @ w * 0.1
        return carry

    jax.lax.fori_loop(0, 3, body, None)
    return ref[...] + w


def called_back(x: Any, w: Any) -> Any:
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.pure_callback(lambda a: np.asarray(a) * 2, shape, x) @ w


def kernel(x: Any, w: Any) -> Any:
    def double(a: Any, out: Any) -> None:
        out[...] = a[...] * 2

    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(double, out_shape=shape, interpret=True)(x) @ w


@jax.custom_batching.custom_vmap
def own_vmap(x: Any) -> Any:
    return jnp.sin(x)


@own_vmap.def_vmap
def _own_vmap_rule(size: int, batched: Any, x: Any) -> Any:
    return jnp.cos(x), batched[0]


def solved(x: Any, w: Any) -> Any:
    a = x @ x.T + 8 * jnp.eye(8)
    return jax.lax.custom_linear_solve(
        lambda v: a @ v, w[0], lambda _, b: jnp.linalg.solve(a, b), symmetric=True
    )


class Callable_:
    def __call__(self, x: Any, w: Any) -> Any:
        return x @ w


def other_keys(x: Any, w: Any) -> Any:
    key = jax.random.key(0, impl="rbg")
    return jax.random.normal(key, (8, 64)), jax.random.bits(key, (16, 16)), x @ w


CASES: dict[str, Callable[..., Any]] = {
    "shard_map": mapped,
    "references": referenced,
    "callback": called_back,
    "pallas": kernel,
    "custom_vmap": lambda x, w: jax.vmap(own_vmap)(x) + own_vmap(w),
    "custom_linear_solve": solved,
    # Pads between elements.
    "associative_scan": lambda x, w: jax.lax.associative_scan(jnp.add, x @ w),
    "no_elements": lambda x, w: (x[:0] * 2, x[:0].sum(), w),
    "rbg": other_keys,
    "small_types": lambda x, w: (x.astype(jnp.int8), x > 0, x.astype(jnp.bfloat16)),
    "segment_sum": lambda x, w: jax.ops.segment_sum(x @ w, jnp.arange(8) % 3, 3),
    "filter_jit": eqx.filter_jit(lambda x, w: x @ w),
    "nnx_jit": nnx.jit(lambda x, w: x @ w),
    "partial": functools.partial(lambda s, x, w: x @ w * s, 2.0),
    "object": Callable_(),
    "passes_through": lambda x, w: (x, x, w),
}


# Of many ops: on one device, and slow on eight.
LONG = ("custom_linear_solve", "associative_scan", "rbg", "pallas")


@pytest.mark.parametrize(
    ("name", "sizes"),
    covering(
        [*((name, (1, 1)) for name in LONG), *((name, SIZES) for name in CASES)],
        lambda case: case[0] not in LONG or case[1] == (1, 1),
    ),
)
def test_unusual_functions(name: str, sizes: tuple[int, int]) -> None:
    fn, args = CASES[name], (normal(0, 8, 8), normal(1, 8, 8))
    # With 1 the scan's pad of a row is constrained along it, which XLA's partitioner
    # refuses (jaxlib 0.10.2: "Expected instruction to have shape equal to f32[1,2]").
    seed = 1
    got = shard(fn, mesh=mesh_of(sizes=sizes), seed=seed)(*args)
    assert_close(got, jax.jit(fn)(*args), atol=1e-4)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_the_function_sees_the_mesh_in_its_context(kind: AxisType) -> None:
    x, w = normal(0, 8, 8), normal(1, 8, 8)
    assert_close(shard(in_context, mesh=mesh_of(kind))(x, w), x @ w + 1)


def test_keys_that_are_drawn_as_a_whole() -> None:
    def draw(x: Any) -> Any:
        return x + jax.random.normal(jax.random.key(1), x.shape)

    with jax.threefry_partitionable(False):
        x = normal(0, 8, 8)
        sharded = shard(draw, mesh=mesh_of(sizes=(1, 2)), seed=1)
        assert_close(sharded(x), jax.jit(draw)(x))


@pytest.mark.parametrize("mesh", [{"a": 1}, {"a": 2, "b": 2}, {"a": 8}])
def test_meshes_of_some_of_the_devices(mesh: Any) -> None:
    x, w = normal(0, 8, 8), normal(1, 8, 8)
    assert_close(rhino.auto_shard(lambda x, w: x @ w, mesh=mesh)(x, w), x @ w)


def test_double_precision() -> None:
    with jax.enable_x64(True):
        x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 8)))
        got = shard(lambda x: x @ x, seed=1)(x)
    assert got.dtype == jnp.float64
    np.testing.assert_allclose(got, np.asarray(x) @ np.asarray(x), rtol=1e-12)


def test_many_runs_in_a_row_without_waiting() -> None:
    step = shard(lambda x, w: (jnp.tanh(x @ w), x.sum()), seed=1)
    x, w = normal(0, 64, 64), normal(1, 64, 64)
    for _ in range(100):
        x, total = step(x, w)
    assert np.isfinite(float(total))
