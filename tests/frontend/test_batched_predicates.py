"""Loops whose condition is batched run as JAX runs them, with the reduction written."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import rhino_jax as rhino
from rhino_jax.frontend.trace import trace
from rhino_jax.frontend.tracing.transforms import with_whole_predicates


def newton(x: Any, limit: Any) -> Any:
    """Rows end at a step of their own; the condition reads a constant."""
    start = 0, x
    return lax.while_loop(
        lambda s: (s[0] < 20) & (jnp.abs(s[1] * s[1] - limit).max() > 1e-3),
        lambda s: (s[0] + 1, (s[1] + limit / s[1]) / 2),
        start,
    )


def walk(key: Any, x: Any) -> Any:
    """A key is carried: each chain draws until it is far enough."""

    def body(s: Any) -> Any:
        key, x = s
        key, now = jax.random.split(key)
        return key, x + jax.random.uniform(now, x.shape)

    return lax.while_loop(lambda s: s[1].sum() < 8, body, (key, x))[1]


def rows(fn: Any) -> Any:
    return lambda x: jax.vmap(fn)(x, jnp.arange(1.0, 1 + len(x)))


def drawn(x: Any) -> Any:
    return jax.vmap(walk)(jax.random.split(jax.random.key(0), len(x)), x)


def grid(x: Any) -> Any:
    both = jax.vmap(jax.vmap(newton, (0, None)))
    return both(x.reshape(4, 4, 4), jnp.arange(1.0, 5))


def in_a_scan(x: Any) -> Any:
    return lax.scan(lambda x, _: (rows(newton)(x)[1], x.sum()), x, length=3)


FNS = {"rows": rows(newton), "keys": drawn, "grid": grid, "scan": in_a_scan}


@pytest.mark.parametrize("name", FNS)
def test_results_are_the_same(name: str) -> None:
    x = np.random.default_rng(0).uniform(1, 3, (16, 4)).astype(np.float32)
    closed = jax.make_jaxpr(FNS[name])(x)
    written = with_whole_predicates(closed)
    assert "reduce_or" in str(written) and "reduce_or" not in str(closed)
    assert with_whole_predicates(written) is written
    found, right = (
        jax.core.eval_jaxpr(j.jaxpr, j.consts, x) for j in (written, closed)
    )
    for a, b in zip(found, right, strict=True):
        np.testing.assert_array_equal(a, b)
    pins = {"x": jax.P("x")}
    options = {"hardware": "cpu:8", "mesh": {"x": 8}, "progress": False}
    plan = rhino.plan(FNS[name], x, pins=pins, **options)
    for a, b in zip(jax.tree.leaves(plan.jit(FNS[name])(x)), right, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def test_ops_stand_on_the_line_of_their_loop() -> None:
    program = trace(FNS["rows"], (np.ones((16, 4), np.float32),), {}).program
    made = [op for op in program.ops if op.name in ("reduce_or", "select_n")]
    assert made and {op.source.line for op in made} == {
        next(op for op in program.ops if op.name == "while").source.line
    }


def test_a_loop_of_one_condition_stays() -> None:
    closed = jax.make_jaxpr(newton)(np.ones(4, np.float32), 2.0)
    assert with_whole_predicates(closed) is closed
