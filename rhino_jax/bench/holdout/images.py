"""Models of images: ViT, an MLP-Mixer, ResNet, and a denoising U-Net."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from rhino_jax.bench.holdout import parts
from rhino_jax.bench.holdout.parts import Params
from rhino_jax.models import weights
from rhino_jax.models.wide_resnet import conv
from rhino_jax.models.workload import Workload


def vit(
    batch: int = 256,
    image_size: int = 256,
    patch: int = 16,
    width: int = 768,
    num_layers: int = 4,
    num_heads: int = 12,
    num_classes: int = 1000,
) -> Workload:
    """Return the vit: classification of [batch, image_size, image_size, 3].

    It pools over patches.
    """
    num_patches = (image_size // patch) ** 2

    described = {
        "patches": weights.normal(patch, patch, 3, width),
        "positions": weights.normal(num_patches, width, fan_in=width),
        "layers": [parts.layer_init(width)] * num_layers,
        "ln": weights.norm(width),
        "head": parts.dense_init(width, num_classes),
    }

    def loss_fn(params: Params, batch: Params) -> jax.Array:
        images = batch["images"].astype(jnp.bfloat16)
        x = jax.lax.conv_general_dilated(
            images,
            params["patches"].astype(images.dtype),
            (patch, patch),
            "VALID",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        x = x.reshape(x.shape[0], -1, width)
        x = x + params["positions"].astype(x.dtype)
        for p in params["layers"]:
            x = parts.layer(p, x, num_heads)
        x = parts.layer_norm(params["ln"], x.mean(1))
        return parts.cross_entropy(parts.dense(params["head"], x), batch["labels"])

    draws = parts.labelled_images(batch, image_size, num_classes)
    return parts.training("unseen-vit", batch, described, loss_fn, draws)


def mixer(
    batch: int = 256,
    num_patches: int = 256,
    patch_size: int = 768,
    width: int = 1024,
    num_layers: int = 6,
    num_classes: int = 1000,
) -> Workload:
    """Return the mixer: classification of images as [batch, patches, pixels]."""

    described = {
        "stem": parts.dense_init(patch_size, width),
        "layers": [
            {
                "ln1": weights.norm(width),
                "tokens": parts.mlp_init(num_patches, width // 2),
                "ln2": weights.norm(width),
                "channels": parts.mlp_init(width, 4 * width),
            }
        ]
        * num_layers,
        "ln": weights.norm(width),
        "head": parts.dense_init(width, num_classes),
    }

    def loss_fn(params: Params, batch: Params) -> jax.Array:
        x = parts.dense(params["stem"], batch["patches"].astype(jnp.bfloat16))
        for p in params["layers"]:
            y = jnp.swapaxes(parts.layer_norm(p["ln1"], x), 1, 2)
            x = x + jnp.swapaxes(parts.mlp(p["tokens"], y), 1, 2)
            x = x + parts.mlp(p["channels"], parts.layer_norm(p["ln2"], x))
        x = parts.layer_norm(params["ln"], x).mean(1)
        return parts.cross_entropy(parts.dense(params["head"], x), batch["labels"])

    draws = {
        "patches": parts.noise(batch, num_patches, patch_size),
        "labels": parts.tokens(num_classes, batch),
    }

    return parts.training("unseen-mixer", batch, described, loss_fn, draws)


def resnet(
    batch: int = 256,
    image_size: int = 64,
    blocks: Sequence[int] = (1, 1, 1, 1),
    width: int = 64,
    num_classes: int = 1000,
) -> Workload:
    """Return the resnet: classification of [batch, image_size, image_size, 3].

    Blocks are basic (two 3x3 convolutions), with GroupNorm, in float32.
    """
    plan = []
    channels = width
    for stage, num in enumerate(blocks):
        for i in range(num):
            plan.append((channels, width * 2**stage, 2 if stage and not i else 1))
            channels = width * 2**stage

    described = {
        "stem": weights.normal(3, 3, 3, width),
        "stem_norm": weights.norm(width),
        "blocks": [
            {
                "conv1": weights.normal(3, 3, i, o),
                "norm1": weights.norm(o),
                "conv2": weights.normal(3, 3, o, o),
                "norm2": weights.norm(o),
                **({} if i == o else {"skip": weights.normal(1, 1, i, o)}),
            }
            for i, o, _ in plan
        ],
        "head": parts.dense_init(channels, num_classes),
    }

    def loss_fn(params: Params, batch: Params) -> jax.Array:
        x = conv(batch["images"], params["stem"])
        x = jax.nn.relu(parts.group_norm(params["stem_norm"], x))
        for p, (_, _, stride) in zip(params["blocks"], plan, strict=True):
            y = conv(x, p["conv1"], stride)
            y = jax.nn.relu(parts.group_norm(p["norm1"], y))
            y = parts.group_norm(p["norm2"], conv(y, p["conv2"]))
            x = conv(x, p["skip"], stride) if "skip" in p else x
            x = jax.nn.relu(x + y)
        x = x.mean((1, 2))
        return parts.cross_entropy(parts.dense(params["head"], x), batch["labels"])

    draws = parts.labelled_images(batch, image_size, num_classes)
    return parts.training("unseen-resnet", batch, described, loss_fn, draws)


def unet(
    batch: int = 128,
    image_size: int = 64,
    width: int = 128,
    multipliers: Sequence[int] = (1, 2, 4),
    num_heads: int = 8,
) -> Workload:
    """Return the unet: noise prediction in [batch, image_size, image_size, 3].

    It has attention at its lowest resolution.
    """

    described = _init(width, [width * m for m in multipliers])

    def loss_fn(params: Params, batch: Params) -> jax.Array:
        noisy = (batch["images"] + batch["noise"]).astype(jnp.bfloat16)
        time = _embedded(params, batch["times"], width, noisy.dtype)
        predicted = _denoise(params, noisy, time, num_heads).astype(jnp.float32)
        return jnp.square(predicted - batch["noise"]).mean()

    draws = {
        "images": parts.noise(batch, image_size, image_size, 3),
        "noise": parts.noise(batch, image_size, image_size, 3),
        "times": lambda key: jax.random.uniform(key, (batch,)),
    }

    return parts.training("unseen-unet", batch, described, loss_fn, draws)


def _init(width: int, widths: Sequence[int]) -> Params:
    """Return the parameters; `widths`: channels by level, the outermost first."""
    inner, embedded = widths[-1], 4 * width
    return {
        "time1": parts.dense_init(width, embedded),
        "time2": parts.dense_init(embedded, embedded),
        "stem": weights.normal(3, 3, 3, width),
        "down": [
            _block_init(a, b, embedded)
            for a, b in zip([width, *widths[:-1]], widths, strict=True)
        ],
        "norm": weights.norm(inner),
        "attention": parts.attention_init(inner),
        "up": [
            _block_init(a + b, b, embedded)
            for a, b in zip([inner, *widths[:0:-1]], reversed(widths), strict=True)
        ],
        "out_norm": weights.norm(width),
        "out": weights.normal(3, 3, width, 3),
    }


def _block_init(inputs: int, outputs: int, embedded: int) -> Params:
    return {
        "norm1": weights.norm(inputs),
        "conv1": weights.normal(3, 3, inputs, outputs),
        "time": parts.dense_init(embedded, outputs),
        "norm2": weights.norm(outputs),
        "conv2": weights.normal(3, 3, outputs, outputs),
        "skip": weights.normal(1, 1, inputs, outputs),
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
    x = conv(x, params["stem"])
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
    return conv(x, params["out"])


def _block(p: Params, x: jax.Array, time: jax.Array) -> jax.Array:
    y = conv(jax.nn.silu(parts.group_norm(p["norm1"], x)), p["conv1"])
    y = y + parts.dense(p["time"], time)[:, None, None, :]
    y = conv(jax.nn.silu(parts.group_norm(p["norm2"], y)), p["conv2"])
    return y + conv(x, p["skip"])
