"""A decoder with rotary positions and SwiGLU, layers in a `lax.scan`.

A second scan accumulates gradients over micro-batches.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

from rhino_jax.models.config import ModelConfig
from rhino_jax.models.workload import Workload


def rms_norm(x: Any, scale: Any) -> Any:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def rotary(x: Any) -> Any:
    """Rotate x [B, S, N, H] by its position in S."""
    half = x.shape[-1] // 2
    rates = 10_000.0 ** (-jnp.arange(half) / half)
    angles = jnp.arange(x.shape[1])[:, None, None] * rates
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate(
        [first * cos - second * sin, second * cos + first * sin], axis=-1
    )


def loss_fn(params: Any, tokens: Any) -> Any:
    """Return the mean next-token cross entropy of tokens [B, S + 1]."""

    def layer(x: Any, p: Any) -> tuple[Any, None]:
        q, k, v = jnp.einsum("bsd,dcnh->cbsnh", rms_norm(x, p["norm1"]), p["qkv"])
        y = jax.nn.dot_product_attention(rotary(q), rotary(k), v, is_causal=True)
        x = x + jnp.einsum("bsnh,nhd->bsd", y, p["out"])
        y = rms_norm(x, p["norm2"])
        return x + (jax.nn.silu(y @ p["gate"]) * (y @ p["up"])) @ p["down"], None

    x, _ = jax.lax.scan(layer, params["embed"][tokens[:, :-1]], params["layers"])
    losses = optax.softmax_cross_entropy_with_integer_labels(
        x @ params["head"], tokens[:, 1:]
    )
    return losses.mean()


def workload(
    batch: int = 32,
    seq_len: int = 64,
    width: int = 128,
    num_layers: int = 4,
    num_heads: int = 4,
    vocab: int = 512,
    micro_batches: int = 4,
) -> Workload:
    """Return the workload: next-token training of [batch, seq_len] in micro-batches."""
    optimizer = optax.adamw(1e-3)
    shapes = {
        "norm1": (width,),
        "qkv": (width, 3, num_heads, width // num_heads),
        "out": (num_heads, width // num_heads, width),
        "norm2": (width,),
        "gate": (width, 3 * width),
        "up": (width, 3 * width),
        "down": (3 * width, width),
    }

    def init(key: jax.Array) -> tuple[Any, ...]:
        keys = iter(jax.random.split(key, len(shapes) + 2))

        def made(shape: tuple[int, ...]) -> Any:
            return jax.random.normal(next(keys), shape) / math.sqrt(width)

        layers = {name: made((num_layers, *shape)) for name, shape in shapes.items()}
        layers |= {name: 1 + layers[name] for name in ("norm1", "norm2")}
        params = {"embed": made((vocab, width)), "layers": layers}
        params["head"] = made((width, vocab))
        return params, optimizer.init(params)

    def make_batch(key: jax.Array) -> Any:
        return jax.random.randint(key, (batch, seq_len + 1), 0, vocab)

    def train_step(params: Any, opt_state: Any, tokens: Any) -> tuple[Any, Any, Any]:
        def add(total: Any, part: Any) -> tuple[Any, None]:
            found = jax.value_and_grad(loss_fn)(params, part)
            return jax.tree.map(jnp.add, total, found), None

        zero = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
        parts = tokens.reshape(micro_batches, -1, seq_len + 1)
        total, _ = jax.lax.scan(add, zero, parts)
        loss, grads = jax.tree.map(lambda x: x / micro_batches, total)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return Workload(
        name="newcomer-llama",
        config=ModelConfig(batch=batch),
        init=init,
        make_batch=make_batch,
        step=train_step,
        donate_argnums=(0, 1),
    )
