"""Losses, each of which meets the batch in its own way, and a step of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax


B, S, D, V = 8, 6, 4, 12


def params():
    rng = np.random.default_rng(0)
    shapes = {"embed": (V, D), "w": (D, D), "out": (D, V)}
    return {k: rng.normal(size=n).astype(np.float32) for k, n in shapes.items()}


def batch():
    rng = np.random.default_rng(1)
    return {
        "x": rng.normal(size=(B, D)).astype(np.float32),
        "y": rng.integers(V, size=B, dtype=np.int32),
        "tokens": rng.integers(V, size=(B, S), dtype=np.int32),
        "mask": (rng.uniform(size=(B, S)) < 0.7).astype(np.float32),
    }


def step_of(loss, tx=None, has_aux=False):
    tx = tx or optax.sgd(0.1, momentum=0.9)

    def step(params, state, batch):
        out, grads = jax.value_and_grad(loss, has_aux=has_aux)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, out

    return step, (params(), tx.init(params()), batch())


def hidden(p, b):
    return jnp.tanh(p["embed"][b["tokens"]] @ p["w"])


def logits(p, b):
    return jnp.tanh(b["x"] @ p["w"]) @ p["out"]


def cross_entropy(p, b):
    found = optax.softmax_cross_entropy_with_integer_labels(logits(p, b), b["y"])
    return found.mean()


def masked(p, b):
    out = hidden(p, b) @ p["out"]
    each = optax.softmax_cross_entropy_with_integer_labels(out, b["tokens"])
    return jnp.sum(each * b["mask"]) / jnp.sum(b["mask"])


def masked_by_row(p, b):
    out = hidden(p, b) @ p["out"]
    each = optax.softmax_cross_entropy_with_integer_labels(out, b["tokens"])
    weights = b["mask"] * (b["tokens"] != 0)
    return jnp.mean((each * weights).sum(1) / jnp.maximum(weights.sum(1), 1))


def dropout(p, b):
    keep = jax.random.bernoulli(jax.random.key(3), 0.8, (B, S, D))
    h = jnp.where(keep, hidden(p, b) / 0.8, 0)
    return jnp.mean(h @ p["out"] * b["mask"][..., None])


def narrow_dropout(p, b):
    bits = jax.random.bits(jax.random.key(3), (S, B), jnp.uint8)
    return jnp.mean(hidden(p, b) * (bits.T < 100)[..., None])


def rbg_dropout(p, b):
    key = jax.random.key(3, impl="rbg")
    return jnp.mean(hidden(p, b) * jax.random.bernoulli(key, 0.8, (B, S, D)))


def key_per_row(p, b):
    keys = jax.random.split(jax.random.key(5), B)
    noise = jax.vmap(lambda k: jax.random.normal(k, (S, D)))(keys)
    return jnp.mean((hidden(p, b) + noise) ** 2)


def positions(p, b):
    at = jnp.arange(B * S, dtype=jnp.float32).reshape(B, S, 1) / (B * S)
    return jnp.mean(hidden(p, b) * jnp.cos(at))


def one_hot(p, b):
    hot = jax.nn.one_hot(b["y"], V)
    return -jnp.mean(jnp.sum(hot * jax.nn.log_softmax(logits(p, b)), -1))


def along_axis(p, b):
    logs = jax.nn.log_softmax(logits(p, b))
    return -jnp.mean(jnp.take_along_axis(logs, b["y"][:, None], 1))


def by_row_number(p, b):
    logs = jax.nn.log_softmax(logits(p, b))
    return -jnp.mean(logs[jnp.arange(B), b["y"]])


def merged(p, b):
    flat = hidden(p, b).reshape(B * S, D) @ p["out"]
    logs = jax.nn.log_softmax(flat)
    return -jnp.mean(jnp.take_along_axis(logs, b["tokens"].reshape(-1, 1), 1))


def swapped(p, b):
    h = jnp.swapaxes(hidden(p, b), 0, 1).reshape(S * B, D) @ p["out"]
    return jnp.mean(jax.nn.logsumexp(h.reshape(S, B, V), -1) * b["mask"].T)


def running(p, b):
    h = jnp.cumsum(hidden(p, b), 1)
    return jnp.mean(jnp.sort(h, 1) * jnp.arange(S)[:, None])


def recurrent(p, b):
    def cell(h, x):
        h = jnp.tanh(x + h @ p["w"])
        return h, h

    x = jnp.swapaxes(p["embed"][b["tokens"]], 0, 1)
    _, hs = lax.scan(cell, jnp.zeros((B, D)), x)
    return jnp.mean(hs**2)


def layered(p, b):
    weights = jnp.stack([p["w"]] * 3)

    @jax.checkpoint
    def layer(h, w):
        return jnp.tanh(h @ w) + h, jnp.sum(w**2)

    h, norms = lax.scan(layer, p["embed"][b["tokens"]], weights)
    return jnp.mean((h @ p["out"]) ** 2) + 1e-3 * norms.sum()


def two_ways(p, b):
    scale = lax.cond(p["w"][0, 0] > 0, jnp.sin, jnp.cos, p["w"])
    h = lax.cond(p["w"][0, 0] > 0, jnp.tanh, jnp.sin, b["x"] @ scale)
    return jnp.mean(h**2)


def until(p, b):
    return lax.fori_loop(0, 3, lambda i, h: jnp.tanh(h @ p["w"]), b["x"]).mean()


@jax.custom_vjp
def squared(x):
    return x**2


squared.defvjp(lambda x: (x**2, x), lambda x, g: (2 * x * g,))


def custom(p, b):
    return jnp.mean(squared(jax.nn.relu(b["x"] @ p["w"])))


def weighed_by_norm(p, b):
    return cross_entropy(p, b) + 0.1 * sum(jnp.sum(x**2) for x in p.values())


def scattered(p, b):
    counts = jnp.zeros((V,)).at[b["y"]].add(logits(p, b).sum(1))
    return jnp.sum(counts) * 0.01


def smallest(p, b):
    return jnp.max(logits(p, b)) - jnp.min(logits(p, b))


def associative(p, b):
    """As in Mamba. A scan over an even length takes strided slices of nothing."""

    def joined(left, right):
        return left[0] * right[0], right[0] * left[1] + right[1]

    h = hidden(p, b)[:, :4]
    _, h = lax.associative_scan(joined, (jax.nn.sigmoid(h), h), axis=1)
    return jnp.mean((h @ p["out"]) ** 2)


LINEAR_LOSSES = [
    cross_entropy, masked, masked_by_row, dropout, narrow_dropout, rbg_dropout,
    key_per_row, positions, one_hot, along_axis, by_row_number, merged, swapped,
    running, recurrent, layered, two_ways, until, custom, weighed_by_norm, scattered,
    associative,
]  # fmt: skip


def balanced_layers(p, b, wrap=jax.checkpoint):
    """A balancing loss in every layer of a scan."""

    @wrap
    def layer(h, w):
        h = jnp.tanh(h @ w)
        chosen = jax.nn.softmax(h)
        share = jnp.mean(chosen > 0.25, (0, 1)) * jnp.mean(chosen, (0, 1))
        return h, jnp.sum(share)

    stack = jnp.stack([p["w"], 0.5 * p["w"], -p["w"]])
    h, shares = lax.scan(layer, p["embed"][b["tokens"]], stack)
    return jnp.mean((h @ p["out"]) ** 2) + shares.sum()


def balanced_layers_kept(p, b):
    return balanced_layers(p, b, lambda f: f)
