"""Random linear regions compute the same with their sums left open."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.passes.deferred_reductions.pricing import delayed_everywhere, normal, ran


ROWS, INNER, COLUMNS = 4, 8, 6


def _unary(rng: np.random.Generator, x: Any, other: Any) -> Any:
    n = x.shape[-1]
    ways = [
        lambda: -x,
        lambda: 0.5 * x,
        lambda: x / (1.0 + other**2),
        lambda: other * x,
        lambda: x.astype(jnp.float32),
        lambda: x.reshape(2, ROWS // 2, n).transpose(1, 0, 2).reshape(ROWS, n),
        lambda: jnp.concatenate([x[:, n // 2 :], x[:, : n // 2]], 1),
        lambda: lax.dynamic_slice(jnp.pad(x, ((1, 1), (0, 0))), (1, 0), x.shape),
        lambda: jnp.where(other > 0, x, 0.0),
        lambda: jnp.where(other > 0, other, x),
        lambda: jnp.cumsum(x, 1)[:, ::-1],
        lambda: lax.dynamic_update_slice(jnp.zeros((ROWS, n)), x[1:], (1, 0)),
        lambda: jnp.broadcast_to(x.sum(0, keepdims=True), x.shape),
        lambda: x @ jnp.full((n, n), 0.1),
        lambda: jnp.tanh(x),
        lambda: x + other,
        lambda: other - x,
        lambda: jax.jit(lambda y: y * 2.0)(x),
        lambda: jax.checkpoint(lambda y: jnp.sin(y))(x),
    ]
    return ways[rng.integers(len(ways))]()


def _loop(rng: np.random.Generator, x: Any, a: Any, b: Any) -> Any:
    decay, from_x = 0.5 * rng.integers(1, 3), rng.integers(2)
    plain = float(rng.integers(2))

    def step(total: Any, scale: Any) -> Any:
        part = (scale * a) @ b
        return decay * total + part + plain * scale, part if rng.integers(2) else None

    start = x if from_x else jnp.zeros_like(x)
    total, parts = lax.scan(step, start, jnp.arange(3.0), reverse=bool(rng.integers(2)))
    return total if parts is None else total + parts.sum(0)


def _random(seed: int) -> Any:
    def fn(*arrays: Any) -> list[Any]:
        rng = np.random.default_rng(seed)
        lefts, rights, other = arrays[:3], arrays[3:6], arrays[6]
        values = [other]
        for _ in range(rng.integers(4, 14)):
            a, b = lefts[rng.integers(3)], rights[rng.integers(3)]
            x, y = (values[rng.integers(len(values))] for _ in range(2))
            match rng.integers(5):
                case 0:
                    values.append(a @ b)
                case 1:
                    values.append(_loop(rng, x, a, b))
                case 2:
                    values.append(x + y if rng.integers(2) else x - y)
                case _:
                    values.append(_unary(rng, x, other))
        return values[-3:]

    return fn


@pytest.mark.parametrize("seeds", [range(k, k + 6) for k in range(0, 24, 6)], ids=str)
def test_random_regions(seeds: range) -> None:
    opened = 0
    for seed in seeds:
        args = normal([(ROWS, INNER)] * 3 + [(INNER, COLUMNS)] * 3 + [(ROWS, COLUMNS)])
        traced, again, found = delayed_everywhere(_random(seed), args)
        opened += len(found)
        for before, after in zip(ran(traced, args), ran(again, args), strict=True):
            scale = 1 + np.abs(before).max()
            np.testing.assert_allclose(
                after / scale, before / scale, atol=3e-5, err_msg=str(seed)
            )
    assert opened
