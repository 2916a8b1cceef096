"""Merged dims stay merged where their parts would make the rows of a product short."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from rhino_jax._compat import open_jaxpr
from rhino_jax.frontend.split_dims import split_merged_dims
from rhino_jax.frontend.split_dims.forms import LANES
from rhino_jax.verify.hlo.module import parse_module
from rhino_jax.verify.hlo.work import WorkReader
from tests.verify.extras import mesh_of_target


def pixels_at_pixels(x: jax.Array) -> jax.Array:
    """x [B, H, W, D] looks at its own pixels."""
    tokens = x.reshape(x.shape[0], -1, x.shape[-1])
    weights = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", tokens, tokens))
    return x + jnp.einsum("bqk,bkd->bqd", weights, tokens).reshape(x.shape)


def pixels_at_words(x: jax.Array) -> jax.Array:
    """Likewise at 64 words, as wide as these are."""
    tokens = x.reshape(x.shape[0], -1, x.shape[-1])
    words = jnp.ones((x.shape[0], 64, x.shape[-1]))
    weights = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", tokens, words))
    return x + jnp.einsum("bqk,bkd->bqd", weights, words).reshape(x.shape)


@pytest.mark.parametrize(
    ("fn", "parts", "is_apart"),
    [
        (pixels_at_pixels, (32, 32), False),
        (pixels_at_pixels, (2, 64), False),
        (pixels_at_pixels, (2, LANES), True),
        (pixels_at_pixels, (LANES, 2), True),
        (pixels_at_words, (32, 32), True),
    ],
)
def test_parts_are_kept_where_rows_stay_long(
    fn: Any, parts: tuple[int, int], is_apart: bool
) -> None:
    x = jax.ShapeDtypeStruct((2, *parts, 8), jnp.float32)
    before = jax.make_jaxpr(fn)(x)
    after = split_merged_dims(before)
    assert (after is not before) == is_apart
    dot = next(e for e in open_jaxpr(after).eqns if e.primitive.name == "dot_general")
    tokens = parts if is_apart else (math.prod(parts),)
    assert dot.outvars[0].aval.shape[: 1 + len(tokens)] == (2, *tokens)


@pytest.mark.compile_only
@pytest.mark.parametrize(
    ("parts", "least", "most"),
    [((8, 128), 0.9, 1.2), ((16, 64), 1.8, 2.6), ((32, 32), 3.5, 5.5)],
)
def test_the_compiler_pads_short_rows(
    parts: tuple[int, ...], least: float, most: float
) -> None:
    """Attention over 1,024 tokens in parts takes so many times what it takes merged."""
    sharding = NamedSharding(mesh_of_target("v5e:2x2"), PartitionSpec())

    def cycles(parts: tuple[int, ...]) -> int:
        q, k = ("uv", "xy") if len(parts) > 1 else ("u", "x")

        def loss(x: jax.Array) -> jax.Array:
            scores = jnp.einsum(f"b{q}nd,b{k}nd->bn{q}{k}", x, x)
            axes = tuple(range(-len(parts), 0))
            weights = jax.nn.softmax(scores.astype(jnp.float32), axes)
            y = jnp.einsum(f"bn{q}{k},b{k}nd->b{q}nd", weights.astype(x.dtype), x)
            return jnp.square(y.astype(jnp.float32)).sum()

        shape = (8, *parts, 8, 32)
        x = jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding)
        text = jax.jit(jax.grad(loss)).lower(x).compile().as_text() or ""
        work = WorkReader(parse_module(text), lambda w: float(w.cycles or 0))
        return work.program().cycles

    assert least <= cycles(parts) / cycles((1024,)) <= most
