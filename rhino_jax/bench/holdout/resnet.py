"""A residual network of basic blocks (two 3x3 convolutions) and GroupNorm, float32."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from rhino_jax.bench.holdout import parts
from rhino_jax.bench.holdout.parts import Keys, Params
from rhino_jax.models.workload import Workload


def workload(
    batch: int = 256,
    image_size: int = 64,
    blocks: Sequence[int] = (1, 1, 1, 1),
    width: int = 64,
    num_classes: int = 1000,
) -> Workload:
    """Return the workload: classification of [batch, image_size, image_size, 3]."""
    plan = []
    channels = width
    for stage, num in enumerate(blocks):
        for i in range(num):
            plan.append((channels, width * 2**stage, 2 if stage and not i else 1))
            channels = width * 2**stage

    def init(keys: Keys) -> Params:
        return {
            "stem": parts.normal(keys, 3, 3, 3, width),
            "stem_norm": parts.norm_init(width),
            "blocks": [
                {
                    "conv1": parts.normal(keys, 3, 3, i, o),
                    "norm1": parts.norm_init(o),
                    "conv2": parts.normal(keys, 3, 3, o, o),
                    "norm2": parts.norm_init(o),
                    **({} if i == o else {"skip": parts.normal(keys, 1, 1, i, o)}),
                }
                for i, o, _ in plan
            ],
            "head": parts.dense_init(keys, channels, num_classes),
        }

    def loss_fn(params: Params, batch: Params) -> jax.Array:
        x = parts.conv(batch["images"], params["stem"])
        x = jax.nn.relu(parts.group_norm(params["stem_norm"], x))
        for p, (_, _, stride) in zip(params["blocks"], plan, strict=True):
            y = parts.conv(x, p["conv1"], stride)
            y = jax.nn.relu(parts.group_norm(p["norm1"], y))
            y = parts.group_norm(p["norm2"], parts.conv(y, p["conv2"]))
            x = parts.conv(x, p["skip"], stride) if "skip" in p else x
            x = jax.nn.relu(x + y)
        x = x.mean((1, 2))
        return parts.cross_entropy(parts.dense(params["head"], x), batch["labels"])

    def make_batch(key: jax.Array) -> Params:
        return parts.labelled_images(key, batch, image_size, num_classes)

    return parts.training("unseen-resnet", batch, init, loss_fn, make_batch)
