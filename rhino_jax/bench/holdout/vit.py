"""A vision transformer that pools over patches."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from rhino_jax.bench.holdout import parts
from rhino_jax.bench.holdout.parts import Keys, Params
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
    """Return the workload: classification of [batch, image_size, image_size, 3]."""
    num_patches = (image_size // patch) ** 2

    def init(keys: Keys) -> Params:
        return {
            "patches": parts.normal(keys, patch, patch, 3, width),
            "positions": parts.normal(keys, num_patches, width, fan_in=width),
            "layers": [parts.layer_init(keys, width) for _ in range(num_layers)],
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
            x = parts.layer(p, x, num_heads)
        x = parts.layer_norm(params["ln"], x.mean(1))
        return parts.cross_entropy(parts.dense(params["head"], x), batch["labels"])

    def make_batch(key: jax.Array) -> Params:
        return parts.labelled_images(key, batch, image_size, num_classes)

    return parts.training("unseen-vit", batch, init, loss_fn, make_batch)
