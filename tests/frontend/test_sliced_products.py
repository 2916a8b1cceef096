"""Slices of products, and products of padded arrays, as products of slices."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rhino_jax._compat import without_dead_code
from rhino_jax.frontend.regions import inner_equations
from rhino_jax.frontend.tracing.open_moves import with_open_moves
from tests.runtime.stand_in import normal


def loss(x: Any, w: Any) -> Any:
    logits = (x @ w.T).astype(jnp.float32)[:, 1:-1]
    return jnp.mean(jax.nn.logsumexp(logits, -1))


def first_columns(x: Any, w: Any) -> Any:
    return (x @ w.T)[..., :40]


def by_head(x: Any, w: Any) -> Any:
    """Batch dims stay; one free dim of each operand is sliced."""
    q = x.reshape(*x.shape[:2], 2, -1)
    return jnp.einsum("bqhd,bkhd->bhqk", q, q)[:, :, 3:, :-2]


def padded(x: Any, w: Any) -> Any:
    return jax.lax.pad(x, 0.0, ((0, 0, 0), (2, 3, 0), (0, 0, 0))) @ w[:3].T


CASES = {
    "loss": jax.value_and_grad(loss, (0, 1)),
    "first columns": first_columns,
    "by head": by_head,
    "padded": padded,
}


def rows_of_products(jaxpr: Any) -> Counter[tuple[int, ...]]:
    found = (e for e in inner_equations(jaxpr) if e.primitive.name == "dot_general")
    return Counter(e.outvars[0].aval.shape for e in found)


@pytest.mark.parametrize("name", CASES)
def test_fewer_elements_are_computed_and_they_are_the_same(name: str) -> None:
    args = normal(0, 4, 32, 16), normal(1, 64, 16)
    traced = jax.make_jaxpr(CASES[name])(*args)
    found = without_dead_code(with_open_moves(traced))
    flops = [
        sum(np.prod(shape) * n for shape, n in rows_of_products(j).items())
        for j in (traced, found)
    ]
    assert flops[1] < flops[0]
    got = jax.core.eval_jaxpr(found.jaxpr, found.consts, *args)
    want = jax.core.eval_jaxpr(traced.jaxpr, traced.consts, *args)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def several_readers(x: Any, w: Any) -> Any:
    y = x @ w.T
    return y[:, :-1], y.sum()


def with_steps(x: Any, w: Any) -> Any:
    return (x @ w.T)[:, ::2]


def of_batch(x: Any, w: Any) -> Any:
    return jnp.einsum("bsd,bvd->bsv", x, jnp.stack([w] * 4))[1:]


def padded_vocabulary(x: Any, w: Any) -> Any:
    """It is padded to be sharded evenly."""
    return x @ jnp.pad(w, ((0, 6), (0, 0))).T


def padded_with_ones(x: Any, w: Any) -> Any:
    return jax.lax.pad(x, 1.0, ((0, 0, 0), (2, 3, 0), (0, 0, 0))) @ w[:3].T


@pytest.mark.parametrize(
    "run", [several_readers, with_steps, of_batch, padded_vocabulary, padded_with_ones]
)
def test_all_others_stay(run: Any) -> None:
    traced = jax.make_jaxpr(run)(normal(0, 4, 32, 16), normal(1, 64, 16))
    found = without_dead_code(with_open_moves(traced))
    assert rows_of_products(found) == rows_of_products(traced)
