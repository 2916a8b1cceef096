"""Layers of the models here.

Parameters are dicts of float32 arrays; activations are bfloat16 where a model casts
them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from rhino_jax.models import weights
from rhino_jax.models.config import ModelConfig
from rhino_jax.models.train import train_step_for
from rhino_jax.models.workload import Workload


Params = Any


def dense_init(fan_in: int, fan_out: int) -> Params:
    return {"w": weights.normal(fan_in, fan_out), "b": weights.zeros(fan_out)}


def dense(p: Params, x: jax.Array) -> jax.Array:
    """Apply a dense layer: x [..., I] → [..., O]."""
    return x @ p["w"].astype(x.dtype) + p["b"].astype(x.dtype)


def layer_norm(p: Params, x: jax.Array) -> jax.Array:
    """Apply LayerNorm over the last dim, in float32."""
    wide = x.astype(jnp.float32)
    mean = wide.mean(-1, keepdims=True)
    variance = jnp.square(wide - mean).mean(-1, keepdims=True)
    wide = (wide - mean) * jax.lax.rsqrt(variance + 1e-6)
    return (wide * p["scale"] + p["bias"]).astype(x.dtype)


def attention_init(width: int) -> Params:
    return {name: dense_init(width, width) for name in ("q", "k", "v", "out")}


def attention(
    p: Params,
    x: jax.Array,
    context: jax.Array,
    num_heads: int,
    mask: jax.Array | None = None,
    bias: jax.Array | None = None,
) -> jax.Array:
    """Apply attention of x [B, S, D] to context [B, T, D].

    Args:
      p: parameters.
      x: queries.
      context: keys and values.
      num_heads: number of heads.
      mask: [S, T], True where a position may attend; None: everywhere.
      bias: [heads, S, T], added to the scores; None: no bias.
    """

    def split(y: jax.Array) -> jax.Array:
        return y.reshape(*y.shape[:-1], num_heads, -1)

    sources = {"q": x, "k": context, "v": context}
    q, k, v = (split(dense(p[name], y)) for name, y in sources.items())
    scores = jnp.einsum("bshd,bthd->bhst", q, k).astype(jnp.float32)
    scores = scores / math.sqrt(q.shape[-1])
    if bias is not None:
        scores = scores + bias
    if mask is not None:
        scores = jnp.where(mask, scores, -1e9)
    weights = jax.nn.softmax(scores).astype(x.dtype)
    y = jnp.einsum("bhst,bthd->bshd", weights, v)
    return dense(p["out"], y.reshape(x.shape))


def mlp_init(width: int, hidden: int) -> Params:
    return {
        "up": dense_init(width, hidden),
        "down": dense_init(hidden, width),
    }


def mlp(p: Params, x: jax.Array) -> jax.Array:
    return dense(p["down"], jax.nn.gelu(dense(p["up"], x)))


def layer_init(width: int) -> Params:
    """Return attention, and an MLP with four times as many hidden units."""
    return {
        "ln1": weights.norm(width),
        "attention": attention_init(width),
        "ln2": weights.norm(width),
        "mlp": mlp_init(width, 4 * width),
    }


def layer(
    p: Params, x: jax.Array, num_heads: int, mask: jax.Array | None = None
) -> jax.Array:
    """Apply a pre-norm layer: x [B, S, D] → [B, S, D]."""
    y = layer_norm(p["ln1"], x)
    x = x + attention(p["attention"], y, y, num_heads, mask)
    return x + mlp(p["mlp"], layer_norm(p["ln2"], x))


def group_norm(p: Params, x: jax.Array, groups: int = 32) -> jax.Array:
    """Normalise x [B, H, W, C] over space and the channels of each group."""
    wide = x.astype(jnp.float32).reshape(*x.shape[:-1], groups, -1)
    mean = wide.mean((1, 2, 4), keepdims=True)
    variance = wide.var((1, 2, 4), keepdims=True)
    wide = ((wide - mean) * jax.lax.rsqrt(variance + 1e-5)).reshape(x.shape)
    return (wide * p["scale"] + p["bias"]).astype(x.dtype)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(
        logits.astype(jnp.float32), labels
    ).mean()


def training(
    name: str,
    batch: int,
    described: Params,
    loss_fn: Callable[[Params, Any], jax.Array],
    draws: Mapping[str, Draw],
    optimizer: optax.GradientTransformation | None = None,
) -> Workload:
    """Return the train step of a loss, with the parameters that weights describe."""
    tx = optimizer or optax.adamw(1e-3)

    def init_all(key: jax.Array) -> tuple[Any, ...]:
        params = weights.draw(described, key)
        return params, tx.init(params)

    def make_batch(key: jax.Array) -> Params:
        pairs = zip(draws.items(), jax.random.split(key, len(draws)), strict=True)
        return {name: draw(own) for (name, draw), own in pairs}

    return Workload(
        name=name,
        config=ModelConfig(batch=batch),
        init=init_all,
        make_batch=make_batch,
        step=train_step_for(loss_fn, tx),
        donate_argnums=(0, 1),
    )


Draw = Callable[[jax.Array], jax.Array]
"""An array of a batch, drawn from a key."""


def labelled_images(batch: int, image_size: int, num_classes: int) -> dict[str, Draw]:
    """Return images [batch, image_size, image_size, 3] and their classes."""
    images = noise(batch, image_size, image_size, 3)
    return {"images": images, "labels": tokens(num_classes, batch)}


def noise(*shape: int) -> Draw:
    return lambda key: jax.random.normal(key, shape)


def tokens(vocab: int, *shape: int) -> Draw:
    return lambda key: jax.random.randint(key, shape, 0, vocab)
