"""A denoising U-Net with attention at its lowest resolution."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from rhino_jax.bench.holdout import parts
from rhino_jax.bench.holdout.parts import Keys, Params
from rhino_jax.models.workload import Workload


def workload(
    batch: int = 128,
    image_size: int = 64,
    width: int = 128,
    multipliers: Sequence[int] = (1, 2, 4),
    num_heads: int = 8,
) -> Workload:
    """Return the workload: noise prediction in [batch, image_size, image_size, 3]."""

    def init(keys: Keys) -> Params:
        return _init(keys, width, [width * m for m in multipliers])

    def loss_fn(params: Params, batch: Params) -> jax.Array:
        noisy = (batch["images"] + batch["noise"]).astype(jnp.bfloat16)
        time = _embedded(params, batch["times"], width, noisy.dtype)
        predicted = _denoise(params, noisy, time, num_heads).astype(jnp.float32)
        return jnp.square(predicted - batch["noise"]).mean()

    def make_batch(key: jax.Array) -> Params:
        a, b, c = jax.random.split(key, 3)
        shape = batch, image_size, image_size, 3
        return {
            "images": jax.random.normal(a, shape),
            "noise": jax.random.normal(b, shape),
            "times": jax.random.uniform(c, (batch,)),
        }

    return parts.training("unseen-unet", batch, init, loss_fn, make_batch)


def _init(keys: Keys, width: int, widths: Sequence[int]) -> Params:
    """Return the parameters; `widths`: channels by level, the outermost first."""
    inner, embedded = widths[-1], 4 * width
    return {
        "time1": parts.dense_init(keys, width, embedded),
        "time2": parts.dense_init(keys, embedded, embedded),
        "stem": parts.normal(keys, 3, 3, 3, width),
        "down": [
            _block_init(keys, a, b, embedded)
            for a, b in zip([width, *widths[:-1]], widths, strict=True)
        ],
        "norm": parts.norm_init(inner),
        "attention": parts.attention_init(keys, inner),
        "up": [
            _block_init(keys, a + b, b, embedded)
            for a, b in zip([inner, *widths[:0:-1]], reversed(widths), strict=True)
        ],
        "out_norm": parts.norm_init(width),
        "out": parts.normal(keys, 3, 3, width, 3),
    }


def _block_init(keys: Keys, inputs: int, outputs: int, embedded: int) -> Params:
    return {
        "norm1": parts.norm_init(inputs),
        "conv1": parts.normal(keys, 3, 3, inputs, outputs),
        "time": parts.dense_init(keys, embedded, outputs),
        "norm2": parts.norm_init(outputs),
        "conv2": parts.normal(keys, 3, 3, outputs, outputs),
        "skip": parts.normal(keys, 1, 1, inputs, outputs),
    }


def _embedded(params: Params, times: jax.Array, width: int, dtype: Any) -> jax.Array:
    """Embed times [B] → [B, 4 width]."""
    rates = jnp.exp(-jnp.arange(width // 2) * 8.0 / width)
    angles = times[:, None] * rates
    time = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=1)
    time = jax.nn.silu(parts.dense(params["time1"], time.astype(dtype)))
    return jax.nn.silu(parts.dense(params["time2"], time))


def _denoise(params: Params, x: jax.Array, time: jax.Array, heads: int) -> jax.Array:
    """Predict the noise in images [B, H, W, 3]."""
    x = parts.conv(x, params["stem"])
    kept = []
    for i, p in enumerate(params["down"]):
        if i:
            b, h, w, c = x.shape
            x = x.reshape(b, h // 2, 2, w // 2, 2, c).mean((2, 4))
        x = _block(p, x, time)
        kept.append(x)
    b, h, w, c = x.shape
    y = parts.group_norm(params["norm"], x).reshape(b, h * w, c)
    y = parts.attention(params["attention"], y, y, heads)
    x = x + y.reshape(x.shape)
    for i, p in enumerate(params["up"]):
        if i:
            x = jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2)
        x = _block(p, jnp.concatenate([x, kept.pop()], axis=-1), time)
    x = jax.nn.silu(parts.group_norm(params["out_norm"], x))
    return parts.conv(x, params["out"])


def _block(p: Params, x: jax.Array, time: jax.Array) -> jax.Array:
    y = parts.conv(jax.nn.silu(parts.group_norm(p["norm1"], x)), p["conv1"])
    y = y + parts.dense(p["time"], time)[:, None, None, :]
    y = parts.conv(jax.nn.silu(parts.group_norm(p["norm2"], y)), p["conv2"])
    return y + parts.conv(x, p["skip"])
