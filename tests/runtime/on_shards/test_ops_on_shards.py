"""Ops that every device does for its part: as planned, and with the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conv_programs import HARDWARE
from jax import lax
from jax.sharding import PartitionSpec as P

import rhino_jax as rhino
from rhino_jax.frontend import registry
from rhino_jax.frontend.rules.reshape import reshape_rule
from rhino_jax.ir.factor import parse_rule
from rhino_jax.runtime.interpret import uncut_whole
from tests.cases import covering


ROWS = np.random.default_rng(0).standard_normal((64, 32)).astype(np.float32)
IMAGES = np.random.default_rng(1).standard_normal((16, 32, 32, 16)).astype(np.float32)
FILTERS = np.random.default_rng(2).standard_normal((3, 3, 4, 8)).astype(np.float32)

ONE, TWO = {"x": 8}, {"x": 4, "y": 2}


def top(x: jax.Array) -> Any:
    return lax.top_k(jnp.tanh(x), 4)


def top_in_loop(x: jax.Array) -> jax.Array:
    return lax.scan(lambda c, _: (c * 0.5, lax.top_k(c, 4)[0].sum()), x, None, 3)[1]


def spectrum(x: jax.Array) -> jax.Array:
    return jnp.abs(jnp.fft.fft(x))


def max_pool(x: jax.Array) -> jax.Array:
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def average_pool(x: jax.Array) -> jax.Array:
    total = lax.reduce_window(x, 0.0, lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    return total / 4


def grouped(x: jax.Array) -> jax.Array:
    return lax.conv_general_dilated(
        x, FILTERS, (1, 1), "SAME", feature_group_count=4,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )  # fmt: skip


def windowed(x: jax.Array) -> jax.Array:
    kernel = (jnp.tile(FILTERS, (1, 1, 4, 1)) / 4).astype(x.dtype)
    return lax.conv_general_dilated(
        x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def gradient(fn: Callable[..., Any]) -> Callable[..., Any]:
    def of(x: jax.Array) -> jax.Array:
        return jax.grad(lambda x: sum(
            jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(fn(x)) if y.dtype == x.dtype
        ))(x)  # fmt: skip

    return of


CASES = {
    "top_k": (top, ROWS),
    "top_k in a loop": (top_in_loop, ROWS),
    "fft": (spectrum, ROWS),
    "max_pool": (max_pool, IMAGES),
    "average_pool": (average_pool, IMAGES),
    "grouped": (grouped, IMAGES),
    "windowed": (windowed, IMAGES),
}


def test_gradients_of_complex_convolutions_run_on_shards() -> None:
    def power(x: jax.Array) -> jax.Array:
        return jnp.abs(windowed(x * (1 + 1j)))

    got = rhino.auto_shard(
        gradient(power), mesh=TWO, hardware=HARDWARE, pins={"x": P(None, "x")}
    )(IMAGES[:1, :8, :8])
    want = jax.jit(gradient(power))(IMAGES[:1, :8, :8])
    np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-4)


PINS = [(ONE, P("x")), (ONE, P(None, "x")), (TWO, P("x", "y"))]
WINDOWS = P(None, "y", "x")


# Every op, both passes and all pins in the short run, and the rest of their product.
SHORT = [
    (name, bool(i % 2), *PINS[(2 * i + i // 3) % 3]) for i, name in enumerate(CASES)
]


@pytest.mark.parametrize(
    ("name", "is_gradient", "mesh", "pin"),
    covering(
        [
            (name, is_gradient, *place)
            for name in CASES
            for is_gradient in (False, True)
            for place in PINS
        ]
        + [("windowed", True, TWO, WINDOWS)],
        [*SHORT, ("windowed", True, TWO, WINDOWS)],
    ),
    ids=str,
)
def test_what_is_compiled_is_what_is_planned(
    name: str, is_gradient: bool, mesh: Mapping[str, int], pin: P
) -> None:
    fn, x = CASES[name]
    fn = gradient(fn) if is_gradient else fn
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    plan = rhino.plan(fn, shape, mesh=mesh, hardware="cpu:8", pins={"x": pin})
    verified = plan.verify(fn, shape, compile_for="cpu")
    assert verified.ok, verified.table()
    for got, want in zip(
        jax.tree.leaves(plan.jit(fn)(x)), jax.tree.leaves(jax.jit(fn)(x)), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-4)


def test_windows_are_cut_and_what_they_hold_is_not() -> None:
    rule = parse_rule("(y s!) -> y", [(32,)], [(16,)], sizes={"s": 2})
    (operand,) = rule.operands
    for axes in [(0,), (0, 1)]:
        assert uncut_whole(rule, operand, (axes,), (8, 2)) is None
    assert uncut_whole(rule, operand, ((0, 1),), (8, 4)) == ((),)
    # Whole from the start, and with a whole factor that is minor.
    sorted_rows = parse_rule("a! -> a!", [(32,)], [(32,)])
    assert uncut_whole(sorted_rows, sorted_rows.operands[0], ((0,),), (8,)) == ((),)
    merged = reshape_rule((4, 6), (6, 4))
    assert uncut_whole(merged, merged.operands[0], ((0,), ()), (2,)) is None
    assert uncut_whole(merged, merged.operands[0], ((0,), ()), (4,)) == ((), ())


def two_layers(kernels: Any, x: jax.Array, wrap: str) -> Any:
    """Gradients of two convolutions, by kernels and images."""

    def layer(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.tanh(lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        ))  # fmt: skip

    def loss(kernels: Any, x: jax.Array) -> jax.Array:
        if wrap == "scan":
            return lax.scan(lambda h, w: (layer(h, w), None), x, kernels)[0].sum()
        run = jax.checkpoint(layer) if wrap == "remat" else layer
        return run(run(x, kernels[0]), kernels[1]).sum()

    return jax.grad(loss, argnums=(0, 1))(kernels, x)


@pytest.mark.parametrize("wrap", covering(["scan", "", "remat"], 2))
def test_borders_are_sent_once_for_all_that_read_them(wrap: str) -> None:
    def step(kernels: Any, x: jax.Array) -> Any:
        return two_layers(kernels, x, wrap)

    args = np.tile(FILTERS[None], (2, 1, 1, 4, 2)) / 4, IMAGES[:1]
    plan = rhino.plan(
        step, *args, mesh={"x": 8}, hardware=HARDWARE, pins={"x": P(None, "x")}
    )
    permutes = {"collective-permute"}
    assert permutes <= {c.kind for c in plan.collectives}
    verified = plan.verify(step, *args, compile_for="cpu")
    assert verified.ok, verified.table()
    assert not [d for d in verified.differences if d.kind in permutes]
    for got, want in zip(
        jax.tree.leaves(plan.jit(step)(*args)),
        jax.tree.leaves(step(*args)),
        strict=True,
    ):
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-4)


def test_shards_of_a_convolution_leave_out_what_negative_padding_does() -> None:
    """XLA:CPU pads nothing where the padding of every dim sums to zero: of a shard's
    rows, which have borders instead, and of (-1, 1)."""

    def convolved(x: Any, w: Any) -> Any:
        numbers = "NHWC", "HWIO", "NHWC"
        padding = [(5, -1), (-1, 1)]
        return lax.conv_general_dilated(x, w, (1, 1), padding, (1, 1), (1, 1), numbers)

    x, w = IMAGES[:2, :16, :5, :3], np.ones((5, 2, 3, 8), np.float32)
    options = {"mesh": ONE, "hardware": HARDWARE, "pins": {"x": P(None, "x")}}
    sharded = rhino.auto_shard(convolved, progress=False, **options)
    np.testing.assert_allclose(sharded(x, w), convolved(x, w), atol=1e-4)


def factors_of(x: jax.Array) -> jax.Array:
    """Cholesky factors, by a call of a foreign function."""
    shapes = (
        jax.ShapeDtypeStruct(x.shape, x.dtype),
        jax.ShapeDtypeStruct(x.shape[:1], jnp.int32),
    )
    call = jax.ffi.ffi_call("lapack_spotrf_ffi", shapes, input_output_aliases={0: 0})
    return jnp.triu(call(x, uplo=np.uint8(ord("U")))[0])


@pytest.mark.parametrize("options", [{}, {"microbatches": 4, "mesh": {"x": 2}}])
def test_foreign_functions_with_a_rule_run_on_shards(
    options: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """XLA gathers their operands, and computes the whole on every device."""

    def step(w: jax.Array, x: jax.Array) -> Any:
        def loss(w: jax.Array) -> jax.Array:
            return jnp.mean(jnp.tanh(x @ w))

        squares = jnp.einsum("bij,bkj->bik", x, x) + 8 * jnp.eye(8)
        return jax.grad(loss)(w), factors_of(squares)

    monkeypatch.setattr(registry, "_RULES", dict(registry._RULES))
    monkeypatch.setattr(registry, "_USER_RULES", set())
    rhino.register_rule("lapack_spotrf_ffi", "b n! m! -> b n! m!, b")
    jnp.linalg.cholesky(jnp.eye(2))  # loads the library
    x = ROWS.reshape(32, 8, 8)
    args = jnp.eye(8), x
    options = {"mesh": ONE, "hardware": HARDWARE, **options}
    plan = rhino.plan(step, *args, **options)
    got, want = plan.jit(step)(*args), jax.jit(step)(*args)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(got[1], want[1], rtol=1e-5, atol=1e-6)
    if "microbatches" not in options:
        assert plan.out_specs[1] == P("x")
        assert plan.verify(step, *args).ok
