"""Micro-batches whose sequence is cut, beside those that are not."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rhino_jax._compat import is_literal, jaxpr_consts, open_jaxpr
from rhino_jax.frontend.trace import trace
from rhino_jax.passes.sequence_slices.sliced import SlicedBody, sliced
from rhino_jax.passes.staged.apart import Apart, take_apart
from rhino_jax.passes.staged.sides import sides_of
from tests.passes import zoo
from tests.passes.interpreter import interpret
from tests.passes.staged.helpers_staged import entering


B, S, D, H, V = 4, 12, 8, 2, 16
"""Of small models: rows, tokens, width, heads, vocabulary."""


def apart_of(step: Callable[..., Any], args: Sequence[Any]) -> tuple[Apart, list[Any]]:
    """A step in two micro-batches, and its arrays."""
    traced = trace(step, args, {}, donate_argnums=(0,))
    closed, program = traced.closed_jaxpr, traced.program
    arrays = [*jax.tree.leaves(args), *jaxpr_consts(closed)]
    return take_apart(closed, program, 2), arrays


@functools.cache
def of_zoo(name: str, **overrides: Any) -> tuple[Apart, list[Any]]:
    traced, arrays = zoo.of_zoo(name, **overrides)
    return take_apart(traced.closed_jaxpr, traced.program, 2), arrays


def training(loss: Callable[..., Any]) -> Callable[..., Any]:
    """A step of gradient descent."""

    def step(params: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step


def tokens(key: int = 1, length: int = S) -> Any:
    rng = np.random.default_rng(key)
    return rng.integers(V, size=(B, length), dtype=np.int32)


def weights(**shapes: tuple[int, ...]) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        name: jnp.asarray(rng.normal(size=shape) / 2, jnp.float32)
        for name, shape in shapes.items()
    }


def attention_weights() -> dict[str, Any]:
    return weights(embed=(V, D), qkv=(3, D, H, D // H), out=(H, D // H, D))


def attending(attend: Callable[..., Any]) -> Callable[..., Any]:
    """The loss of one layer of attention: [B, S, H, D/H] q, k, v to the like, or with
    the batch as a fourth argument."""

    def loss(params: Any, batch: Any) -> Any:
        x = params["embed"][batch["tokens"]]
        q, k, v = (jnp.einsum("bsd,dhk->bshk", x, w) for w in params["qkv"])
        x = x + jnp.einsum("bshk,hkd->bsd", attend(q, k, v, batch), params["out"])
        logits = jax.nn.log_softmax(jnp.tanh(x) @ params["embed"].T)
        picked = jnp.take_along_axis(logits, batch["labels"][..., None], axis=-1)
        return -picked.mean()

    return loss


def attention_step(attend: Callable[..., Any]) -> tuple[Apart, list[Any]]:
    batch = {"tokens": tokens(1), "labels": tokens(2)}
    return apart_of(training(attending(attend)), (attention_weights(), batch))


TRIL, EYE = jnp.tril(jnp.ones((S, S), bool)), jnp.eye(S, dtype=bool)


def is_token(batch: Any) -> Any:
    """Where a key is no padding: [B, 1, 1, S]."""
    return (batch["tokens"] != 0)[:, None, None, :]


def scores_of(q: Any, k: Any) -> Any:
    return jnp.einsum("bqhk,bshk->bhqs", q, k) / 2


def mixed(probabilities: Any, v: Any) -> Any:
    return jnp.einsum("bhqs,bshk->bqhk", probabilities, v)


def masked(mask: Any, low: float = -1e9, axis: int = -1) -> Callable[..., Any]:
    """Attention under a mask, or one that a function makes of the batch."""

    def attend(q: Any, k: Any, v: Any, batch: Any) -> Any:
        seen = mask(batch) if callable(mask) else mask
        scores = jnp.where(seen, scores_of(q, k), low)
        return mixed(jax.nn.softmax(scores, axis=axis), v)

    return attend


def biased(bias: Callable[..., Any]) -> Callable[..., Any]:
    """Attention with what a function of the batch adds to its scores."""

    def attend(q: Any, k: Any, v: Any, batch: Any) -> Any:
        return mixed(jax.nn.softmax(scores_of(q, k) + bias(batch)), v)

    return attend


def check(
    apart: Apart,
    arrays: Sequence[Any],
    lengths: Sequence[int],
    run: Callable[..., list[Any]] = interpret,
) -> SlicedBody:
    """Check that slices leave what the undivided micro-batch leaves, in an order that
    runs."""
    cut = sliced(apart, lengths)
    enters = [np.int32(1), *entering(apart, arrays, run)]
    expected, got = run(apart.piece, enters), run(cut.piece, enters)
    most = max(np.abs(np.asarray(x, np.float64)).max(initial=0) for x in expected)
    for i, (a, b) in enumerate(zip(expected, got, strict=True)):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        atol = 1e-5 * np.abs(a).max(initial=0) + 1e-7 * most
        np.testing.assert_allclose(b, a, rtol=1e-4, atol=atol, err_msg=f"result {i}")
    check_order(apart, cut, len(lengths))
    return cut


def check_order(apart: Apart, cut: SlicedBody, count: int) -> None:
    """No slice reads what one makes that runs after it."""
    is_backward = sides_of(apart).is_backward
    jaxpr = open_jaxpr(cut.piece)
    assert len(jaxpr.eqns) == len(cut.slice_of) == len(cut.source)
    times: dict[Any, int] = {}
    for eqn, t, i in zip(jaxpr.eqns, cut.slice_of, cut.source, strict=True):
        reads = [times.get(v, -1) for v in eqn.invars if not is_literal(v)]
        at = -1
        if t is not None:
            assert i is not None
            at = 2 * count - 1 - t if is_backward[i] else t
        assert max(reads, default=-1) <= at, f"slice {t} of equation {i}: {eqn}"
        times.update(dict.fromkeys(eqn.outvars, at))
    assert {*cut.slice_of} >= {*range(count)}
