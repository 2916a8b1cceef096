"""Reductions over rows that run in one kernel with their readers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import rhino_jax as rhino
from rhino_jax.analysis.inline_regions import inline_regions
from rhino_jax.analysis.row_kernels import find_row_kernels, row_size
from rhino_jax.frontend.trace import trace
from tests.verify.extras import skipped_without_extra


def from_squares(x: jax.Array) -> jax.Array:
    f = x.astype(jnp.float32)
    mean = f.mean(-1, keepdims=True)
    variance = (f * f).mean(-1, keepdims=True) - mean * mean
    return ((f - mean) * jax.lax.rsqrt(variance + 1e-6)).astype(x.dtype)


def centred(x: jax.Array) -> jax.Array:
    f = x.astype(jnp.float32)
    f = f - f.mean(-1, keepdims=True)
    variance = (f * f).mean(-1, keepdims=True)
    return (f * jax.lax.rsqrt(variance + 1e-6)).astype(x.dtype)


def root_mean_square(x: jax.Array) -> jax.Array:
    f = x.astype(jnp.float32)
    return (f * jax.lax.rsqrt((f * f).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype)


def softmax(x: jax.Array) -> jax.Array:
    return jax.nn.softmax(x.astype(jnp.float32)).astype(x.dtype)


def unit(x: jax.Array) -> jax.Array:
    f = x.astype(jnp.float32)
    return (f / jnp.linalg.norm(f, axis=-1, keepdims=True)).astype(x.dtype)


def forward(norm: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, w: norm(x @ w) @ w


def trained(norm: Callable[..., Any]) -> Callable[..., Any]:
    def loss(w: Any, x: Any) -> jax.Array:
        return ((norm(x @ w) @ w).astype(jnp.float32) ** 2).mean()

    return lambda x, w: jax.grad(loss)(w, x)


ONE_KERNEL = {
    "softmax": forward(softmax),
    "softmax, trained": trained(softmax),
    "root mean square": forward(root_mean_square),
    "centred first": forward(centred),
    "unit length": forward(unit),
}
APART = {
    "variance from squares": forward(from_squares),
    "variance from squares, trained": trained(from_squares),
    "root mean square, trained": trained(root_mean_square),
    "unit length, trained": trained(unit),
}


def rows(fn: Callable[..., Any], tokens: int, size: int) -> tuple[int, int]:
    """Number of reductions over rows, and of those in the kernel of their readers."""
    args = [
        jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((tokens, size), (size,) * 2)
    ]
    graph = inline_regions(trace(fn, tuple(args), {}).program)
    every = [n.id for n in graph.nodes if row_size(n, graph)]
    return len(every), len(find_row_kernels(graph))


@pytest.mark.parametrize("name", ONE_KERNEL)
def test_a_diamond_of_rows_is_one_kernel(name: str) -> None:
    found, inside = rows(ONE_KERNEL[name], 128, 64)
    assert found == inside > 0


@pytest.mark.parametrize("name", APART)
def test_statistics_with_several_readers_are_computed_before(name: str) -> None:
    found, inside = rows(APART[name], 128, 64)
    assert found > 0 == inside


def test_scalars_do_not_count_as_rows_and_a_sum_over_columns_neither() -> None:
    def fn(x: Any, w: Any) -> Any:
        y = x @ w
        return (y - 2 * y.max(-1, keepdims=True)) + y.sum(0)

    assert rows(fn, 128, 64) == (1, 1)


@pytest.mark.compile_only
@pytest.mark.slow
@pytest.mark.parametrize("name", (*ONE_KERNEL, *APART))
def test_normalisations_compute_as_long_as_predicted(name: str) -> None:
    fn = {**ONE_KERNEL, **APART}[name]
    args = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((65536, 1024), (1024,) * 2)]
    plan = rhino.plan(fn, *args, mesh={"x": 8}, hardware="h100:8", progress=False)
    with skipped_without_extra():
        found = plan.verify(fn, *args)
    assert found.compiled is not None
    ratio = found.predicted.compute_s / found.compiled.compute_s
    assert 0.85 < ratio < 1.2, ratio
