"""An MLP-Mixer."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from rhino_jax.bench.holdout import parts
from rhino_jax.bench.holdout.parts import Keys, Params
from rhino_jax.models.workload import Workload


def workload(
    batch: int = 256,
    num_patches: int = 256,
    patch_size: int = 768,
    width: int = 1024,
    num_layers: int = 6,
    num_classes: int = 1000,
) -> Workload:
    """Return the workload: classification of images as [batch, patches, pixels]."""

    def init(keys: Keys) -> Params:
        return {
            "stem": parts.dense_init(keys, patch_size, width),
            "layers": [
                {
                    "ln1": parts.norm_init(width),
                    "tokens": parts.mlp_init(keys, num_patches, width // 2),
                    "ln2": parts.norm_init(width),
                    "channels": parts.mlp_init(keys, width, 4 * width),
                }
                for _ in range(num_layers)
            ],
            "ln": parts.norm_init(width),
            "head": parts.dense_init(keys, width, num_classes),
        }

    def loss_fn(params: Params, batch: Params) -> jax.Array:
        x = parts.dense(params["stem"], batch["patches"].astype(jnp.bfloat16))
        for p in params["layers"]:
            y = jnp.swapaxes(parts.layer_norm(p["ln1"], x), 1, 2)
            x = x + jnp.swapaxes(parts.mlp(p["tokens"], y), 1, 2)
            x = x + parts.mlp(p["channels"], parts.layer_norm(p["ln2"], x))
        x = parts.layer_norm(params["ln"], x).mean(1)
        return parts.cross_entropy(parts.dense(params["head"], x), batch["labels"])

    def make_batch(key: jax.Array) -> Params:
        first, second = jax.random.split(key)
        return {
            "patches": jax.random.normal(first, (batch, num_patches, patch_size)),
            "labels": parts.tokens(second, num_classes, batch),
        }

    return parts.training("unseen-mixer", batch, init, loss_fn, make_batch)
