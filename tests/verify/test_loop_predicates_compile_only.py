"""Loops that data end: compiled programs reduce predicates and gather state as often as
their plans say."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import rhino_jax as rhino
from tests.verify.extras import skipped_without_extra


pytestmark = [pytest.mark.compile_only, pytest.mark.slow]

CHAINS, ROWS, SIZE = 64, 2**17, 200


def sampler(w: Any, x: Any, y: Any, key: Any) -> Any:
    """Chains of leapfrog steps until a U-turn."""

    def density(w: Any) -> Any:
        z = x @ w
        return (y * z - jnp.logaddexp(0.0, z)).sum()

    def step(s: Any) -> Any:
        i, w, m, _ = s
        g = jax.grad(density)(w)
        return i + 1, w + 1e-3 * (m + g), m + g, g

    def chain(w: Any, key: Any) -> Any:
        def trajectory(start: Any, key: Any) -> Any:
            def is_apart(s: Any) -> Any:
                return (s[0] < 16) & ((s[1] - start) @ s[2] >= 0)

            m = jax.random.normal(key, start.shape)
            w = lax.while_loop(is_apart, step, (0, start, m, m))[1]
            return w, w

        return lax.scan(trajectory, w, jax.random.split(key, 4))[1]

    return jax.vmap(chain)(w, jax.random.split(key, CHAINS))


def adaptive(y: Any, up: Any, down: Any) -> Any:
    """An ODE solver that chooses a step size per row."""

    def field(y: Any) -> Any:
        return jnp.tanh(y @ up) @ down

    def one(y: Any) -> Any:
        def step(s: Any) -> Any:
            t, dt, y = s
            first, second = field(y), field(y + dt * field(y))
            fits = dt * jnp.linalg.norm(second - first) < 1e-2
            after = y + dt * (first + second) / 2
            return (
                jnp.where(fits, t + dt, t),
                jnp.where(fits, dt * 1.5, dt / 2),
                jnp.where(fits, after, y),
            )

        return lax.while_loop(lambda s: s[0] < 1, step, (0.0, 0.1, y))[2]

    return jax.vmap(one)(y)


def shape(*dims: int, dtype: Any = jnp.float32) -> Any:
    return jax.ShapeDtypeStruct(dims, dtype)


KEY = jax.eval_shape(lambda: jax.random.key(0))
CASES = {
    "sampler": (sampler, (shape(CHAINS, SIZE), shape(ROWS, SIZE), shape(ROWS), KEY)),
    "adaptive": (adaptive, (shape(1024, 512), shape(512, 4096), shape(4096, 512))),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_each_trip_communicates_as_planned(name: str) -> None:
    fn, args = CASES[name]
    plan = rhino.plan(fn, *args, hardware="h100:8", progress=False)
    with skipped_without_extra():
        verified = plan.verify(fn, *args)
    # Predicates are reduced, or gathered and reduced by each device.
    in_trips = [c for c in plan.collectives if c.count > 1]
    assert in_trips and verified.ok
