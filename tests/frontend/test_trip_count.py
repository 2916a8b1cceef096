"""How often loops run, and when that is only assumed."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from imported import program_of
from jax import lax

from rhino_jax.frontend.known_values import ASSUMED_TRIP_COUNT


def trips(fn: Any, *args: Any) -> tuple[int, bool]:
    """Trip count of the only `while`, and whether it is known."""
    program, _ = program_of(fn, *args)
    (call,) = [op.call for op in program.ops if op.name == "while"]
    assert call is not None
    return call.trip_count, call.is_trip_count_known


def count(start: Any, go_on: Any, step: Any) -> Any:
    """A loop over (counter, value)."""

    def fn(x: jax.Array) -> Any:
        return lax.while_loop(
            lambda s: go_on(s[0]), lambda s: (step(s[0]), s[1] * 2), (start, x)
        )

    return fn


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (count(0, lambda i: i < 10, lambda i: i + 1), 10),
        (count(1, lambda i: i < 10, lambda i: i + 2), 5),
        (count(0, lambda i: i <= 10, lambda i: i + 5), 3),
        (count(0, lambda i: 10 > i, lambda i: 3 + i), 4),
        (count(9, lambda i: i > 0, lambda i: i - 1), 9),
        (count(9, lambda i: i >= 0, lambda i: i + (-3)), 4),
        (count(9, lambda i: 0 <= i, lambda i: i - 3), 4),
        (count(5, lambda i: i < 5, lambda i: i + 1), 0),
        (count(0, lambda i: i + 1 < 10, lambda i: i + 1), 9),
        (count(0, lambda i: i < 10, lambda i: i + 1 + 1), 5),
        (count(7, lambda i: i <= 5, lambda i: i - 1), 0),
        (count(0.0, lambda i: i < 1.0, lambda i: i + 0.3), 4),
        (count(0, jax.jit(lambda i: i < 6), jax.jit(lambda i: i + 1)), 6),
    ],
)  # fmt: skip
def test_counting_loops(fn: Any, expected: int) -> None:
    assert trips(fn, jnp.ones(3)) == (expected, True)


@pytest.mark.parametrize(
    "fn",
    [
        count(0, lambda i: i < 10, lambda i: i * 2),
        count(0, lambda i: i < 10, lambda i: i - 1),
        count(0, lambda i: i != 10, lambda i: i + 1),
        count(0, lambda i: jnp.sin(i) < 10, lambda i: i + 1),
    ],
)
def test_other_loops_are_assumed(fn: Any) -> None:
    assert trips(fn, jnp.ones(3)) == (ASSUMED_TRIP_COUNT, False)


def test_bound_from_an_argument_is_assumed() -> None:
    def fn(n: jax.Array, x: jax.Array) -> jax.Array:
        return lax.fori_loop(0, n, lambda i, s: s + i, x)

    assert trips(fn, 7, jnp.ones(3)) == (ASSUMED_TRIP_COUNT, False)


def test_loop_from_a_typed_start_is_known() -> None:
    def fn(x: jax.Array) -> Any:
        return lax.while_loop(
            lambda s: s[0] < 6, lambda s: (s[0] + 1, s[1]), (jnp.zeros((), "int32"), x)
        )

    assert trips(fn, jnp.ones(3)) == (6, True)


def test_bound_passed_through_a_call_is_known() -> None:
    @jax.jit
    def run(n: jax.Array, x: jax.Array) -> jax.Array:
        return lax.fori_loop(0, n, lambda i, s: s + i, x)

    assert trips(lambda x: run(6, x), jnp.ones(3)) == (6, True)


def test_bound_computed_from_constants_is_known() -> None:
    def fn(x: jax.Array) -> jax.Array:
        steps = jnp.minimum(jnp.reshape(jnp.int32(4), (1,)) * 2, 10)
        return lax.fori_loop(1, steps[0] + 1, lambda i, s: s + i, x)

    assert trips(fn, jnp.ones(3)) == (8, True)


def test_loop_that_may_end_early_has_its_bound() -> None:
    def fn(x: jax.Array) -> Any:
        return lax.while_loop(
            lambda s: (s[0] < 12) & (s[1].sum() > 0),
            lambda s: (s[0] + 1, s[1] - 1),
            (0, x),
        )

    assert trips(fn, jnp.ones(3)) == (12, False)


def test_guard_against_endless_loops_is_no_bound() -> None:
    def fn(x: jax.Array) -> Any:
        return lax.while_loop(
            lambda s: (s[0] < 2**31 - 1) & (s[1].sum() > 0),
            lambda s: (s[0] + 1, s[1] - 1),
            (0, x),
        )

    assert trips(fn, jnp.ones(3)) == (ASSUMED_TRIP_COUNT, False)


def test_batched_condition_is_assumed() -> None:
    def one(limit: jax.Array) -> jax.Array:
        return lax.while_loop(lambda i: i < limit, lambda i: i + 1, 0)

    assert trips(jax.vmap(one), jnp.arange(3)) == (ASSUMED_TRIP_COUNT, False)


def test_body_with_much_sharing_is_read_once() -> None:
    def grow(s: Any) -> Any:
        i, x = s
        for _ in range(200):
            x = x + jnp.sin(x) * x
        return i + 1, x

    def fn(x: jax.Array) -> Any:
        return lax.while_loop(lambda s: s[0] < 3, grow, (0, x))

    assert trips(fn, 1.0) == (3, True)
