"""Random mixtures of experts, written as people write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def layer(p: Any, x: Any, how: Any) -> tuple[Any, Any]:
    """Return a layer's results, and its auxiliary loss, written as `how` says."""
    experts, choices = p["router"].shape[1], how["choices"]
    logits = x @ p["router"]
    scores = logits + lax.stop_gradient(p["free"]) if how["free"] else logits
    _, chosen = lax.top_k(scores, choices)
    weights = jax.nn.softmax(jnp.take_along_axis(logits, chosen, 1))
    keys, flat = chosen.reshape(-1), weights.reshape(-1)
    at = jnp.arange(keys.size)
    if how["sort"] == "argsort":
        order = jnp.argsort(keys)
        found, sorted_weights = keys[order], flat[order]
    elif how["sort"] == "lax.sort":
        found, order = lax.sort((keys, at), num_keys=1, is_stable=True)
        sorted_weights = flat[order]
    else:
        found, order, sorted_weights = lax.sort(
            (keys, at, flat), num_keys=1, is_stable=True
        )
    if how["sizes"] == "bincount":
        sizes = jnp.bincount(keys, length=experts)
    elif how["sizes"] == "one_hot":
        sizes = jax.nn.one_hot(keys, experts, dtype=jnp.int32).sum(0)
    elif how["sizes"] == "scatter":
        sizes = jnp.zeros(experts, jnp.int32).at[keys].add(1)
    else:
        sizes = jnp.bincount(found, length=experts)
    if how["take"] == "index":
        taken = x[order // choices]
    elif how["take"] == "take":
        taken = jnp.take(x, order // choices, axis=0)
    else:
        taken = jnp.repeat(x, choices, axis=0)[order]
    y = lax.ragged_dot(taken, p["up"], sizes)
    if how["gate"]:
        y = jax.nn.silu(lax.ragged_dot(taken, p["gate"], sizes)) * y
    else:
        y = jax.nn.gelu(y)
    y = lax.ragged_dot(y, p["down"], sizes)
    if how["bias"]:
        y += p["bias"][found]
    is_before = how["weigh"] == "before" or how["back"] == "add"
    if is_before:
        y *= sorted_weights[:, None]
    if how["back"] == "add":
        out = jnp.zeros_like(x).at[order // choices].add(y)
    else:
        if how["back"] == "inverse":
            y = y[jnp.zeros_like(order).at[order].set(at)]
        elif how["back"] == "argsort":
            y = jnp.take(y, jnp.argsort(order), axis=0)
        else:
            y = jnp.zeros_like(y).at[order].set(y, unique_indices=True)
        y = y.reshape(-1, choices, x.shape[1])
        out = y.sum(1) if is_before else jnp.einsum("tk,tkd->td", weights, y)
    if how["shared"]:
        out += jnp.tanh(x @ p["up"][0]) @ p["down"][0]
    extra = 0.0
    if how["balance"]:
        chances = jax.nn.softmax(logits).mean(0)
        extra = jnp.sum(chances * sizes / keys.size) * experts
    return x + out, extra


def drawn(seed: int) -> tuple[Callable[..., Any], Any, list[tuple[int, int]]]:
    """Return a random training step, its arguments, and divisions into blocks and parts
    that its tokens and experts allow."""
    rng = np.random.default_rng(seed)

    def pick(*options: Any) -> Any:
        return options[rng.integers(len(options))]

    width, hidden, experts = pick(4, 8), pick(4, 12), pick(2, 4, 6)
    rows, length = pick(4, 8), pick(1, 3, 5)
    how = {
        "choices": min(experts, pick(1, 2, 3)),
        "sort": pick("argsort", "lax.sort", "weights"),
        "sizes": pick("bincount", "one_hot", "scatter", "sorted"),
        "take": pick("index", "take", "repeat"),
        "back": pick("add", "inverse", "argsort", "set"),
        "weigh": pick("before", "after"),
        "gate": pick(True, False),
        "bias": pick(True, False),
        "shared": pick(True, False),
        "balance": pick(True, False),
        "free": pick(True, False),
    }
    loop = pick("unroll", "scan", "checkpoint")

    def loss(p: Any, data: Any) -> Any:
        def body(x: Any, p: Any) -> Any:
            return layer(p, x, how)

        run = jax.checkpoint(body) if loop == "checkpoint" else body
        x = data["x"].reshape(-1, width)
        if loop == "unroll":
            total = 0.0
            for k in range(2):
                x, extra = run(x, jax.tree.map(lambda a, k=k: a[k], p))
                total += extra
        else:
            x, extra = lax.scan(run, x, p)
            total = jnp.sum(extra)
        return jnp.mean(jnp.square(x - data["y"].reshape(x.shape))) + 0.1 * total

    def step(p: Any, data: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(p, data)
        return jax.tree.map(lambda p, g: p - 0.1 * g, p, grads), value

    def array(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32) / 2

    p = {
        "router": array(2, width, experts), "free": array(2, experts),
        "gate": array(2, experts, width, hidden),
        "up": array(2, experts, width, hidden),
        "down": array(2, experts, hidden, width), "bias": array(2, experts, width),
    }  # fmt: skip
    data = {"x": array(rows, length, width), "y": array(rows, length, width)}
    divisions = [
        (count, parts)
        for count in (1, 2, 4, 8)
        for parts in (1, 2, 3)
        if rows % count == 0 and experts % parts == 0 and count * parts > 1
    ]
    return step, (p, data), divisions
