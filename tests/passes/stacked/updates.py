"""Steps whose optimizers multiply the matrices of each weight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


ROWS, D, WIDE = 16, 8, 12

Update = Callable[[jax.Array, Any], jax.Array]
"""(gradient, the program's further input) → update of a weight."""


def weights(layers: int = 2, d: int = D, wide: int = WIDE) -> Any:
    """Return per layer a square weight, a wide one and a tall one."""
    rng = np.random.default_rng(0)
    shapes = {"square": (d, d), "up": (d, wide), "down": (wide, d)}
    return [
        {k: np.float32(rng.normal(size=s) / d**0.5) for k, s in shapes.items()}
        for _ in range(layers)
    ]


def batch(rows: int = ROWS, d: int = D) -> Any:
    return np.float32(np.random.default_rng(1).normal(size=(rows, d)))


def loss(w: Any, x: jax.Array) -> jax.Array:
    for layer in w:
        x = x + jnp.tanh(x @ layer["square"])
        x = x + jax.nn.relu(x @ layer["up"]) @ layer["down"]
    return jnp.mean(x**2)


def orthogonalized(g: jax.Array, scale: Any = 1.0) -> jax.Array:
    """Newton-Schulz steps as of Muon, for matrices and their transposes alike."""
    is_tall = g.shape[0] > g.shape[1]
    x = g.T if is_tall else g
    x = x / (jnp.linalg.norm(x) + 1e-7)
    for _ in range(3):
        a = x @ x.T
        x = 3.4445 * x + (-4.775 * a + 2.0315 * (a @ a)) @ x
    return scale * (x.T if is_tall else x)


def in_a_loop(g: jax.Array, scale: Any) -> jax.Array:
    """The same steps as a loop, in a function of its own."""

    @jax.jit
    def steps(x: jax.Array) -> jax.Array:
        def body(_: Any, x: jax.Array) -> jax.Array:
            return 1.5 * x - 0.5 * (x @ x.T) @ x

        return lax.fori_loop(0, 3, body, x / jnp.linalg.norm(x))

    return scale * steps(g)


def until_it_converges(g: jax.Array, scale: Any) -> jax.Array:
    def body(state: Any) -> Any:
        x, _ = state
        new = 1.5 * x - 0.5 * (x @ x.T) @ x
        return new, jnp.linalg.norm(new - x)

    x = g / jnp.linalg.norm(g)
    return scale * lax.while_loop(lambda s: s[1] > 1e-2, body, (x, jnp.inf))[0]


def root(m: jax.Array) -> jax.Array:
    values, vectors = jnp.linalg.eigh(m + 1e-3 * jnp.eye(len(m)))
    return (vectors * jnp.maximum(values, 1e-3) ** -0.25) @ vectors.T


def shampoo(g: jax.Array, scale: Any) -> jax.Array:
    return scale * (root(g @ g.T) @ g @ root(g.T @ g))


def soap(g: jax.Array, scale: Any) -> jax.Array:
    """Bounded updates in the eigenbasis of Shampoo's statistics, not in every step."""

    def turned(g: jax.Array) -> jax.Array:
        left, right = (jnp.linalg.eigh(m)[1] for m in (g @ g.T, g.T @ g))
        z = left.T @ g @ right
        return left @ jnp.tanh(z) @ right.T

    return lax.cond(scale > 0.5, turned, lambda g: g, g)


def step_of(update: Update) -> Callable[..., Any]:
    """Return a train step: weights, momentum and batch → new weights, momentum."""

    def step(w: Any, m: Any, x: jax.Array, scale: Any) -> Any:
        g = jax.grad(loss)(w, x)
        m = jax.tree.map(lambda m, g: 0.9 * m + g, m, g)
        return jax.tree.map(lambda w, m: w - 0.1 * update(m, scale), w, m), m

    return step


def clipped(w: Any, m: Any, x: jax.Array, scale: Any) -> Any:
    """A step with gradients and updates of bounded norms over all weights."""

    def bounded(tree: Any) -> Any:
        norm = jnp.sqrt(sum(jnp.sum(a**2) for a in jax.tree.leaves(tree)))
        return jax.tree.map(lambda a: a / jnp.maximum(1, norm), tree)

    g = bounded(jax.grad(loss)(w, x))
    update = bounded(jax.tree.map(orthogonalized, g))
    return jax.tree.map(lambda w, u: w - scale * u, w, update), m


def twice(w: Any, m: Any, x: jax.Array, scale: Any) -> Any:
    """Two steps: the second one's work waits for the first's."""
    step = step_of(orthogonalized)
    return step(*step(w, m, x, scale), x, scale)


def regularized(w: Any, m: Any, x: jax.Array, scale: Any) -> Any:
    """A loss of each layer's weights alone, and the gradients of it."""

    def far_from_orthogonal(a: jax.Array) -> jax.Array:
        gram = a.T @ a
        return jnp.sum((gram @ gram - gram) ** 2)

    def whole(w: Any) -> jax.Array:
        return loss(w, x) + scale * sum(map(far_from_orthogonal, jax.tree.leaves(w)))

    return jax.tree.map(lambda w, g: w - 0.1 * g, w, jax.grad(whole)(w)), m
