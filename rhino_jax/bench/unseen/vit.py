"""A vision transformer that pools over patches."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from rhino_jax.bench.unseen import parts
from rhino_jax.bench.unseen.parts import Keys, Params
from rhino_jax.models.workload import Workload


def workload(
    batch: int = 256,
    image_size: int = 256,
    patch: int = 16,
    width: int = 768,
    num_layers: int = 4,
    num_heads: int = 12,
    num_classes: int = 1000,
) -> Workload:
    """Classification of images [batch, image_size, image_size, 3]."""
    num_patches = (image_size // patch) ** 2

    def init(keys: Keys) -> Params:
        return {
            "patches": parts.normal(keys, patch, patch, 3, width),
            "positions": parts.normal(keys, num_patches, width, fan_in=width),
            "layers": [
                {
                    "ln1": parts.norm_init(width),
                    "attention": parts.attention_init(keys, width),
                    "ln2": parts.norm_init(width),
                    "mlp": parts.mlp_init(keys, width, 4 * width),
                }
                for _ in range(num_layers)
            ],
            "ln": parts.norm_init(width),
            "head": parts.dense_init(keys, width, num_classes),
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
            y = parts.layer_norm(p["ln1"], x)
            x = x + parts.attention(p["attention"], y, y, num_heads)
            x = x + parts.mlp(p["mlp"], parts.layer_norm(p["ln2"], x))
        x = parts.layer_norm(params["ln"], x.mean(1))
        return parts.cross_entropy(parts.dense(params["head"], x), batch["labels"])

    def make_batch(key: jax.Array) -> Params:
        first, second = jax.random.split(key)
        shape = batch, image_size, image_size, 3
        return {
            "images": jax.random.normal(first, shape),
            "labels": parts.tokens(second, num_classes, batch),
        }

    return parts.training("unseen-vit", batch, init, loss_fn, make_batch)
