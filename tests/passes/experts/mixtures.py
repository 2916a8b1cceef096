"""Mixtures of experts as people write them, and what they are rewritten to."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import rhino_jax as rhino
from rhino_jax.frontend.trace import trace
from rhino_jax.passes.experts.choice import sort_in_blocks


WIDTH, HIDDEN, EXPERTS, CHOICES = 8, 12, 6, 2

Layer = Callable[[Any, Any], Any]


def routed(p: Any, x: Any) -> Any:
    """Weights and experts of each token."""
    return lax.top_k(jax.nn.softmax(x @ p["router"]), CHOICES)


def multiplied(p: Any, rows: Any, sizes: Any) -> Any:
    gate = jax.nn.silu(lax.ragged_dot(rows, p["gate"], sizes))
    return lax.ragged_dot(gate * lax.ragged_dot(rows, p["up"], sizes), p["down"], sizes)


def added_back(p: Any, x: Any) -> Any:
    """Results are added to their tokens."""
    weights, experts = routed(p, x)
    order = jnp.argsort(experts.reshape(-1))
    sizes = jnp.bincount(experts.reshape(-1), length=EXPERTS)
    y = multiplied(p, x[order // CHOICES], sizes)
    y *= weights.reshape(-1)[order][:, None]
    return jnp.zeros_like(x).at[order // CHOICES].add(y)


def taken_back(p: Any, x: Any) -> Any:
    """Results are put back in place by the inverse order, and added up."""
    weights, experts = routed(p, x)
    order = jnp.argsort(experts.reshape(-1))
    rows = jnp.take(x, order // CHOICES, axis=0)
    sizes = jax.nn.one_hot(experts.reshape(-1), EXPERTS, dtype=jnp.int32).sum(0)
    y = jnp.take(multiplied(p, rows, sizes), jnp.argsort(order), axis=0)
    return jnp.einsum("tk,tkd->td", weights, y.reshape(-1, CHOICES, x.shape[-1]))


def with_biases(p: Any, x: Any) -> Any:
    """Tokens are repeated, sorted together with their weights; experts have biases."""
    weights, experts = routed(p, x)
    keys = experts.reshape(-1)
    found, order, weights = lax.sort(
        (keys, jnp.arange(keys.size), weights.reshape(-1)), num_keys=1, is_stable=True
    )
    sizes = jnp.bincount(found, length=EXPERTS).astype(jnp.int32)
    y = multiplied(p, jnp.repeat(x, CHOICES, axis=0)[order], sizes)
    y = (y + p["bias"][found]) * weights[:, None]
    y = jnp.zeros_like(y).at[order].set(y, unique_indices=True)
    return y.reshape(-1, CHOICES, x.shape[-1]).sum(1)


def written_inverse(p: Any, x: Any) -> Any:
    """The inverse order is written by a scatter."""
    weights, experts = routed(p, x)
    order = jnp.argsort(experts.reshape(-1))
    inverse = jnp.zeros_like(order).at[order].set(jnp.arange(order.size))
    sizes = jnp.bincount(experts.reshape(-1)[order], length=EXPERTS)
    y = multiplied(p, x[order // CHOICES], sizes)[inverse]
    return (y.reshape(-1, CHOICES, x.shape[-1]) * weights[..., None]).sum(1)


def balanced(p: Any, x: Any) -> Any:
    """An auxiliary term reads how many tokens each expert has, from sorted keys."""
    _, experts = routed(p, x)
    sizes = jnp.bincount(jnp.sort(experts.reshape(-1)), length=EXPERTS)
    return with_biases(p, x) * (1 + 1e-2 * jnp.mean(jnp.square(sizes / x.shape[0])))


LAYERS: list[Layer] = [added_back, taken_back, with_biases, written_inverse]


def params(count: int = 1) -> Any:
    """Weights of some layers."""
    keys = iter(jax.random.split(jax.random.key(0), 8))
    shapes = {
        "router": (WIDTH, EXPERTS), "gate": (EXPERTS, WIDTH, HIDDEN),
        "up": (EXPERTS, WIDTH, HIDDEN), "down": (EXPERTS, HIDDEN, WIDTH),
        "bias": (EXPERTS, WIDTH),
    }  # fmt: skip
    return {
        k: jax.random.normal(next(keys), (count, *s)) / 3 for k, s in shapes.items()
    }


def batch(rows: int = 6, length: int = 4) -> Any:
    """Inputs and targets, [rows, length, width]."""
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(2, rows, length, WIDTH)).astype(np.float32)
    return {"x": x, "y": y}


def step_of(layer: Layer, loop: str = "scan") -> Callable[[Any, Any], Any]:
    """Return a training step of some layers, in a scan or not."""

    def loss(p: Any, data: Any) -> Any:
        x = data["x"].reshape(-1, WIDTH)

        def body(x: Any, p: Any) -> Any:
            return x + layer(p, x), None

        run = jax.checkpoint(body) if loop == "checkpoint" else body
        if loop == "unroll":
            for k in range(p["up"].shape[0]):
                x, _ = run(x, jax.tree.map(lambda a, k=k: a[k], p))
        else:
            x, _ = lax.scan(run, x, p)
        return jnp.mean(jnp.square(x - data["y"].reshape(x.shape)))

    def step(p: Any, data: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(p, data)
        return jax.tree.map(lambda p, g: p - 0.1 * g, p, grads), value

    return step


def on_devices(run: Any, mesh: Any, pin: Any) -> Any:
    """Return a step on emulated devices, with a pin of its data."""

    def train(p: Any, data: Any) -> Any:
        return run(p, data)

    pins = {"data['x']": pin, "data['y']": pin}
    return rhino.auto_shard(train, mesh=mesh, hardware="v5e", pins=pins)


def in_blocks(
    step: Any, args: Any, count: int, parts: int, groups: int = 1
) -> tuple[Any, Any]:
    """Return a step of the same arguments that sorts in blocks, and its jaxpr."""
    traced = trace(step, args, {})
    choice = json.dumps({"count": count, "parts": parts, "groups": groups})
    closed = sort_in_blocks(traced.closed_jaxpr, traced.program, choice)
    tree = jax.tree.structure(jax.eval_shape(step, *args))

    def run(*given: Any) -> Any:
        leaves = jax.tree.leaves(given)
        return jax.tree.unflatten(
            tree, jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *leaves)
        )

    return run, closed
