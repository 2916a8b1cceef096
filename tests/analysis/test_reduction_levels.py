"""Reductions of one level share a latency; what depends on another pays its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from rhino_jax.analysis.dim_classes import find_dim_classes
from rhino_jax.analysis.inline_regions import inline_regions
from rhino_jax.analysis.reduction_levels import find_latency_shares
from rhino_jax.frontend.trace import trace


X = jax.ShapeDtypeStruct((64, 32), jnp.float32)
W = jax.ShapeDtypeStruct((32, 32), jnp.float32)


def shares_of(fn: Callable[..., Any], *args: Any) -> list[float]:
    """Return, in program order, the shares where the batch of 64 rows is sharded."""
    graph = inline_regions(trace(fn, args, {}).program)
    shares = find_latency_shares(graph, find_dim_classes(graph))
    found = []
    for node in graph.nodes:
        if node.op is not None and node.op.rule is not None:
            for f, factor in enumerate(node.op.rule.factors):
                if factor.size == 64 and node.op.rule.partial_results(f):
                    found.append(shares[node.id][f] if node.id in shares else 1.0)
    return found


def centred(x: jax.Array) -> jax.Array:
    return x - x.mean(0)


def test_branches_share_and_chains_do_not() -> None:
    def fn(x: Any, a: Any, b: Any) -> Any:
        return centred(centred(x @ a) + centred(x @ b)) @ a

    assert shares_of(fn, X, W, W) == [0.5, 0.5, 1.0]


def test_gradients_share_with_all_that_nothing_waits_for() -> None:
    def loss(ws: Any, x: Any) -> Any:
        for w in ws:
            x = jnp.tanh(centred(x @ w))
        return jnp.sum(x**2)

    found = shares_of(jax.value_and_grad(loss), [W] * 3, X)
    # Three means and three sums of their gradients; three weights and the loss.
    assert sorted(found) == [0.25] * 4 + [1.0] * 6


def test_other_reductions_and_loops_do_not_share() -> None:
    def apart(x: Any) -> Any:
        return x.max(0), x.sum(0), x.astype(jnp.bfloat16).sum(0, dtype=jnp.bfloat16)

    def loop(x: Any, w: Any) -> Any:
        def body(c: Any, _: Any) -> Any:
            return c @ w, (c.sum(0), (2 * c).sum(0))

        return x.sum(0), jax.lax.scan(body, x, None, length=3)

    assert shares_of(apart, X) == [1.0, 1.0, 1.0]
    assert shares_of(loop, X, W) == pytest.approx([1.0, 0.5, 0.5])


def test_what_waits_for_a_scalar_is_another_level() -> None:
    def serial(x: Any) -> Any:
        x = x / jnp.sum(x)
        return x / jnp.sum(x), jnp.sum(x)

    # The second of the program's sums shares with the third.
    assert shares_of(serial, X) == [1.0, 0.5, 0.5]
