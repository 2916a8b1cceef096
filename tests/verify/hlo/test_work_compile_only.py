"""FLOPs, cycles and times read of programs compiled for TPU and GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from rhino_jax.hardware.files import load_target
from rhino_jax.verify.compile import compile_lowered
from rhino_jax.verify.hlo.reading import read_compiled
from rhino_jax.verify.hlo.records import Reading
from rhino_jax.verify.targets import compile_target
from tests.verify.extras import skipped_without_extra


def _read(
    name: str,
    fn: Callable[..., Any],
    shapes: list[tuple[int, ...]],
    dtype: Any,
) -> Reading:
    """A reading of a function whose first argument is cut over 8 devices."""
    with skipped_without_extra():
        mesh = compile_target(name, {"x": 8})
    specs = [PartitionSpec("x"), *[PartitionSpec()] * (len(shapes) - 1)]
    args = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(shapes, specs, strict=True)
    ]
    compilation = compile_lowered(jax.jit(fn).lower(*args), mesh=mesh)
    return read_compiled(compilation, (("x", 8),), load_target(name))


on_both = pytest.mark.parametrize("name", ["v5e:2x4", "h100:8"])


@pytest.mark.compile_only
@on_both
def test_checkpointed_scan(name: str) -> None:
    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        layer = jax.checkpoint(lambda c, m: (jnp.tanh(jnp.sin(c @ m[0]) @ m[1]), None))
        return jnp.sum(lax.scan(layer, x, w)[0])

    reading = _read(
        name, jax.grad(loss, argnums=1), [(1024, 512), (6, 2, 512, 512)], jnp.float32
    )
    assert reading.compiled.flops_per_device == 6 * 8 * 2 * 128 * 512 * 512


@pytest.mark.compile_only
@on_both
def test_batched_dots(name: str) -> None:
    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        p = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k), axis=-1)
        return jnp.sum(jnp.einsum("bhqk,bkhd->bqhd", p, v) ** 2)

    reading = _read(name, jax.grad(attend), [(16, 256, 8, 64)] * 3, jnp.bfloat16)
    # The gradient of the queries alone: two dots forward, two backward.
    assert reading.compiled.flops_per_device == 4 * 2 * 2 * 8 * 256 * 256 * 64


@pytest.mark.compile_only
@on_both
def test_convolutions_and_their_gradients(name: str) -> None:
    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        out = lax.conv_general_dilated(
            x, w, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return jnp.sum(out**2)

    reading = _read(
        name,
        jax.grad(loss, argnums=(0, 1)),
        [(256, 18, 18, 128), (3, 3, 128, 256)],
        jnp.bfloat16,
    )
    once = 2 * 32 * 16 * 16 * 256 * 9 * 128
    assert reading.compiled.flops_per_device == 3 * once


@pytest.mark.compile_only
@on_both
def test_a_large_matmul_takes_little_more_than_its_peak_says(name: str) -> None:
    n = 8192
    reading = _read(name, jnp.matmul, [(8 * n, n), (n, n)], jnp.bfloat16)
    target = load_target(name)
    peak_s = 2 * n**3 / target.peak_flops_per_s("bfloat16")
    assert reading.compiled.flops_per_device == 2 * n**3
    assert 0.6 < peak_s / reading.compiled.compute_s < 1
    assert reading.compiled.communication_s == 0
