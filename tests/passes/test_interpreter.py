"""Compare what NumPy computes of a jaxpr with what XLA computes of it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.cases import covering
from tests.passes.interpreter import interpret, interpret_on_ranks
from tests.passes.zoo import compiled, of_zoo


RNG = np.random.default_rng(0)
X = RNG.normal(size=(4, 6)).astype(np.float32)
IMAGES = RNG.normal(size=(2, 7, 6, 4)).astype(np.float32)
FILTERS = RNG.normal(size=(3, 2, 2, 8)).astype(np.float32)
AT = np.array([[5, 1], [-1, 9], [2, 2]], np.int32)


def assert_as_compiled(closed: Any, arrays: Any, rtol: float = 2e-5) -> None:
    for x, y in zip(interpret(closed, arrays), compiled(closed, arrays), strict=True):
        assert x.dtype == y.dtype
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        atol = rtol * np.nan_to_num(np.abs(y)).max(initial=1e-6)
        np.testing.assert_allclose(x, y, rtol=rtol, atol=atol)


def convolved(images: Any, filters: Any) -> Any:
    made = lax.conv_general_dilated(
        images,
        filters,
        (2, 1),
        [(1, 2), (0, -1)],
        lhs_dilation=(1, 2),
        rhs_dilation=(2, 1),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=2,
    )
    return jnp.sum(jnp.sin(made))


def looked_up(x: Any) -> Any:
    rows = jax.vmap(lambda row, i: row[i], (0, 0))(x, jnp.array([3, 0, 2, 1]))
    clipped, filled = (x.at[AT].get(mode=m) for m in ("clip", "fill"))
    along = jnp.take_along_axis(x, jnp.argsort(x, 1)[:, :2], 1)
    return rows, clipped, filled, along, jnp.sum(x[AT[:, 0] % 4] ** 2)


def placed(x: Any) -> Any:
    added = x.at[:, AT[:, 0]].add(1.5, mode="drop")
    batched = jax.vmap(lambda row, i: row.at[i].set(0))(x, jnp.array([3, 0, 2, 1]))
    moved = lax.dynamic_update_slice(x, x[:2, :2], (3, jnp.int32(-1)))
    padded = lax.pad(x, 2.0, ((1, -1, 0), (-1, 2, 2)))
    return added, batched, moved, padded, lax.dynamic_slice(x, (2, 5), (3, 2))


def ordered(x: Any) -> Any:
    pair = lax.sort((jnp.round(x), x), num_keys=2)
    ends = jnp.cumsum(x, 1), lax.cumsum(x, 0, reverse=True), lax.cummax(x, 1)
    parts = jnp.split(x, [1, 4], 1)
    return pair, ends, parts, x[::-1, ::2], jnp.argmax(x, 0), jnp.argmin(x, 1)


def looped(x: Any) -> Any:
    last, all_ = lax.scan(lambda c, v: (c * 0.5 + v, c.sum()), x[0], x, reverse=True)
    count, _ = lax.while_loop(
        lambda c: c[1] < 9,
        lambda c: (c[0] + 1, c[1] * 2),
        (jnp.int32(0), jnp.abs(x[0, 0])),
    )
    chosen = [lax.switch(i, [jnp.sin, jnp.cos, jnp.tanh], x) for i in (0, count)]
    return last, all_, count, chosen, jax.checkpoint(jnp.exp)(x)


def numbers(x: Any) -> Any:
    whole = jnp.round(5 * x).astype(jnp.int32)
    three = jnp.full_like(whole, 3)
    ints = lax.div(whole, three), lax.rem(whole, three), whole & three, ~whole ^ three
    floats = (
        lax.integer_pow(x, -2),
        lax.erf(x),
        lax.clamp(-0.5, x, 0.5),
        lax.rsqrt(x * x),
    )
    narrow = x.astype(jnp.bfloat16)
    sums = (narrow @ narrow.T).sum(0), narrow.sum(), jnp.prod(x, 0), jnp.all(x > -1, 0)
    dot = x[0] @ x[1], x[AT[0, 1], AT[0, 0]]
    return (
        ints,
        floats,
        sums,
        dot,
        jnp.einsum("bi,bj->bij", x, x),
        lax.logistic(x),
        x % 0.3,
    )


FUNCTIONS = [looked_up, placed, ordered, looped, numbers]


def test_functions_are_as_compiled() -> None:
    closed = jax.make_jaxpr(lambda x: [f(x) for f in FUNCTIONS])(X)
    assert_as_compiled(closed, [X], rtol=1e-2)


def test_convolutions_are_as_compiled() -> None:
    """Their gradients have groups, negative padding and dilations of their own."""
    step = jax.value_and_grad(convolved, (0, 1))
    assert_as_compiled(jax.make_jaxpr(step)(IMAGES, FILTERS), [IMAGES, FILTERS])


@pytest.mark.parametrize(
    "name",
    covering(
        [
            "mlp-tiny", "decode-tiny", "gpt-tiny", "llama-tiny", "moe-tiny", "rnn-tiny",
            "t5-tiny", "two-tower-tiny", "wide-resnet-tiny",
        ]
    ),
)  # fmt: skip
def test_models_are_as_compiled(name: str) -> None:
    traced, arrays = of_zoo(name)
    assert_as_compiled(traced.closed_jaxpr, arrays, rtol=1e-4)


def in_ring(x: Any) -> Any:
    moved = lax.ppermute(x, "x", [(0, 1), (1, 2)])
    return moved, lax.psum(x, "x"), x + lax.axis_index("x")


def test_ranks_meet_in_collectives() -> None:
    closed = jax.make_jaxpr(in_ring, axis_env=[("x", 3)])(X[0])
    moved, total, added = zip(
        *interpret_on_ranks(closed, [[x] for x in X[:3]]), strict=True
    )
    np.testing.assert_array_equal(moved, [0 * X[0], X[0], X[1]])
    np.testing.assert_allclose(total, [X[:3].sum(0)] * 3, rtol=1e-6)
    np.testing.assert_array_equal(
        added, X[:3] + np.arange(3, dtype=np.float32)[:, None]
    )


def test_the_error_of_a_rank_is_raised() -> None:
    closed = jax.make_jaxpr(in_ring, axis_env=[("x", 3)])(X[0])
    with pytest.raises(AssertionError, match="int32"):
        interpret_on_ranks(closed, [[X[0]], [X[1].astype(np.int32)], [X[2]]])
