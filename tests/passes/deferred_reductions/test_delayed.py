"""Functions with sums left open compute what they did, and sum where it is cheapest."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.passes.deferred_reductions.pricing import delayed_everywhere, normal, ran


def two_products(a, b, c, d):
    return a @ b + c @ d


def into_the_residual(x, dq, dk, dv, wq, wk, wv):
    return x - (0.5 * (dq @ wq.T) + dk @ wk.T + dv @ wv.T)


def accumulated(w, xs, ys):
    def step(total, xy):
        x, y = xy
        return total + x.T @ jnp.tanh(y * w.sum()), x.sum()

    return lax.scan(step, jnp.zeros((8, 16)), (xs, ys))


def accumulated_on_top(start, xs, ys):
    def step(total, xy):
        x, y = xy
        return total + x.T @ y + 1.0, None

    return lax.scan(step, start, (xs, ys))[0]


def shrinking(a, b, c, d):
    z = a @ b + c @ d
    return z.sum(0), lax.slice(a @ b, (0, 0), (2, 4))


def biased(a, b, bias):
    """The sum of a product and of a row that its rows are broadcast from."""
    return lax.slice(a @ b + bias, (0, 0), (2, 4))


def growing(a, b):
    return jnp.broadcast_to((a @ b)[:, None], (8, 32, 16)) * 2.0


def embedded(table, tokens, x):
    def loss(table):
        return (jnp.tanh(table[tokens]) * x).sum() + jnp.sin(x @ table.T).sum()

    return jax.grad(loss)(table)


def recomputed(w, x):
    @jax.checkpoint
    def block(w, x):
        return jnp.tanh(x @ w)

    def loss(w):
        return block(w, block(w, x)).sum()

    return jax.grad(loss)(w)


def convolved(w, x):
    def loss(w):
        one = lax.conv(x, w, (1, 1), "SAME")
        return jnp.sin(one).sum() + jnp.cos(lax.conv(x * x, w, (1, 1), "SAME")).sum()

    return jax.grad(loss)(w)


M, K, N = 8, 32, 16
CASES = {
    "two products": (two_products, ((M, K), (K, N)) * 2, 2, 1),
    "residual": (into_the_residual, ((M, N), *((M, K),) * 3, *((N, K),) * 3), 3, 1),
    "loop": (accumulated, ((3,), (5, K, 8), (5, K, N)), 1, 1),
    "loop on top": (accumulated_on_top, ((8, N), (5, K, 8), (5, K, N)), 1, 1),
    "shrinking": (shrinking, ((M, K), (K, N)) * 2, 3, 2),
    "biased": (biased, ((M, K), (K, N), (1, N)), 1, 1),
    "recomputed": (recomputed, ((N, N), (M, N)), 2, 1),
    "convolved": (convolved, ((8, 3, 3, 3), (4, 3, 8, 8)), 2, 1),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_sums_are_left_open(name: str) -> None:
    fn, shapes, opened, closed = CASES[name]
    args = normal(shapes)
    traced, again, found = delayed_everywhere(fn, args)
    assert sum(len(site.ops) for site in found) == opened
    assert sum(len(site.closed) for site in found) == closed
    assert again.program.transforms[-1].name == "deferred reductions"
    for before, after in zip(ran(traced, args), ran(again, args), strict=True):
        np.testing.assert_allclose(after, before, rtol=1e-4, atol=1e-4)


def test_embeddings_are_summed_once() -> None:
    table, x = normal(((32, 8), (16, 8)))
    tokens = jnp.arange(16) * 7 % 32
    args = table, tokens, x
    traced, again, found = delayed_everywhere(embedded, args)
    assert max(len(site.ops) for site in found) == 2
    for before, after in zip(ran(traced, args), ran(again, args), strict=True):
        np.testing.assert_allclose(after, before, rtol=1e-4, atol=1e-5)


def test_nothing_stays_open_where_values_grow() -> None:
    assert delayed_everywhere(growing, normal(((M, K), (K, N))))[2] == []
