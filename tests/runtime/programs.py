"""Small functions that between them use every kind of sub-program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.runtime.stand_in import normal


TABLE = np.linspace(0.0, 1.0, 64, dtype=np.float32).reshape(8, 8)


@jax.custom_jvp
def soft(x: Any) -> Any:
    return jnp.log1p(jnp.exp(x))


@soft.defjvp
def _soft_jvp(primals: Any, tangents: Any) -> Any:
    # Not the true derivative, so that a lost rule shows.
    return soft(primals[0]), 3.0 * tangents[0]


@jax.custom_vjp
def clipped(x: Any, w: Any) -> Any:
    return jnp.tanh(x @ w)


def _clipped_fwd(x: Any, w: Any) -> Any:
    return clipped(x, w), (x, w)


def _clipped_bwd(kept: Any, ct: Any) -> Any:
    x, w = kept
    return 2.0 * ct @ w.T, x.T @ ct


clipped.defvjp(_clipped_fwd, _clipped_bwd)


def mlp(x: Any, w: Any) -> Any:
    return jnp.tanh(x @ w) @ w.T


def scanned(x: Any, w: Any) -> Any:
    def body(carry: Any, y: Any) -> Any:
        carry = jnp.tanh(carry @ w + y)
        return carry, (carry.sum(0), y * 2)

    return lax.scan(body, x, jnp.stack([x, x + 1, x - 1, x * 2]), unroll=2)


def reversed_scan(x: Any, w: Any) -> Any:
    def body(carry: Any, i: Any) -> Any:
        return carry @ w * 0.1 + i, carry

    return lax.scan(body, x, jnp.arange(3.0), reverse=True)


def looped(x: Any, w: Any) -> Any:
    def cond(state: Any) -> Any:
        i, y = state
        return (i < 5) & (jnp.sum(y) < 1e6)

    return lax.while_loop(cond, lambda s: (s[0] + 1, s[1] @ w * 0.5 + x), (0, x))


def branched(x: Any, w: Any) -> Any:
    def first(y: Any) -> Any:
        return y @ w

    def second(y: Any) -> Any:
        return jnp.sin(y) @ w.T

    a = lax.cond(jnp.sum(x) > 0, first, second, x)
    return lax.switch(jnp.int32(2), [first, second, lambda y: y + 1], a)


def rematted(x: Any, w: Any) -> Any:
    @jax.checkpoint
    def block(y: Any) -> Any:
        return jnp.tanh(y @ w) @ w.T

    policy = jax.checkpoint_policies.dots_saveable
    return block(x) + jax.checkpoint(block, policy=policy, prevent_cse=False)(x)


def remat_scan(x: Any, w: Any) -> Any:
    @jax.checkpoint
    def body(carry: Any, _: Any) -> Any:
        return jnp.tanh(carry @ w), None

    return lax.scan(body, x, None, length=3)[0]


def custom_forward(x: Any, w: Any) -> Any:
    return soft(x) @ w


def custom_backward(x: Any, w: Any) -> Any:
    return clipped(x, w)


def nested_jit(x: Any, w: Any) -> Any:
    @jax.jit
    def inner(y: Any) -> Any:
        return jax.jit(lambda z: z @ w)(y) + TABLE

    return inner(inner(x))


def sorted_rows(x: Any, w: Any) -> Any:
    order = jnp.argsort(x, axis=0)
    taken = jnp.take_along_axis(x, order, axis=0)
    return jnp.concatenate([taken, jnp.cumsum(x, axis=0)], axis=1)[:, 3:11] @ w


def reshaped(x: Any, w: Any) -> Any:
    y = x.reshape(2, 4, 2, 4).transpose(1, 0, 3, 2).reshape(8, 8)
    return jnp.pad(y @ w, ((0, 0), (1, 1)))[:, 2:].at[3].set(1.0)


def randomised(x: Any, w: Any) -> Any:
    key = jax.random.key(7)
    keys = jax.random.split(key, 4)
    noise = jax.random.normal(keys[1], x.shape)
    mask = jax.random.bernoulli(keys[2], 0.5, x.shape)
    many = jax.vmap(lambda k: jax.random.uniform(k, (8,)))(keys)
    return jnp.where(mask, x + noise, 0.0) @ w, many, keys


PROGRAMS: dict[str, Callable[..., Any]] = {
    fn.__name__: fn
    for fn in (
        mlp, scanned, reversed_scan, looped, branched, rematted, remat_scan,
        custom_forward, custom_backward, nested_jit, sorted_rows, reshaped, randomised,
    )
}  # fmt: skip

DIFFERENTIABLE = [n for n in PROGRAMS if n not in ("looped", "sorted_rows")]


def arguments() -> tuple[jax.Array, jax.Array]:
    return normal(0, 8, 8), jnp.asarray(0.3 * np.asarray(normal(1, 8, 8)))


def loss_of(fn: Callable[..., Any]) -> Callable[..., Any]:
    def loss(x: Any, w: Any) -> Any:
        leaves = [
            y
            for y in jax.tree.leaves(fn(x, w))
            if jnp.issubdtype(y.dtype, jnp.floating)
        ]
        return sum(jnp.sum(y**2) for y in leaves)

    return loss
