"""Wide-ResNet with bottleneck blocks and BatchNorm in training mode.

Statistics are over the whole batch; their running averages are state, returned by
every step and fed back.

Source: He et al. 2016 (ResNet), table 1, with the stride in the 3x3 convolution;
Zagoruyko and Komodakis 2016 (Wide ResNet); Zheng et al. 2022 (Alpa).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import optax

from rhino_jax.models import weights
from rhino_jax.models.config import TrainConfig
from rhino_jax.models.layers import Params


_MOMENTUM = 0.9
_EXPANSION = 4


@dataclass(frozen=True, kw_only=True)
class WideResNetConfig(TrainConfig):
    """Sizes: images [N, image_size, image_size, 3].

    Attributes:
      blocks: number of blocks in each stage; a stage halves the image and doubles the
        channels of the one before.
      channels: channels of the first stage, before the bottleneck's expansion by 4.
      width: factor on the bottleneck's inner channels.
      widens: parts that `width` applies to: the whole inside of a bottleneck, or only
        the result of its 3x3 convolution, as in Alpa's models.
      stem: "imagenet" is 7x7 with stride 2 and max-pooling, "cifar" is 3x3.
    """

    image_size: int
    num_classes: int
    blocks: tuple[int, ...]
    channels: int = 64
    width: int = 1
    widens: Literal["inside", "spatial"] = "inside"
    stem: Literal["imagenet", "cifar"] = "imagenet"

    def stages(self) -> tuple[tuple[int, int, int], ...]:
        """Return (input channels, channels, stride) of every block in order."""
        found, inputs = [], self.channels
        for stage, num in enumerate(self.blocks):
            channels = self.channels * 2**stage
            for i in range(num):
                found.append((inputs, channels, 2 if stage and not i else 1))
                inputs = channels * _EXPANSION
        return tuple(found)


def conv(x: jax.Array, kernel: jax.Array, stride: int = 1) -> jax.Array:
    """Convolve x [N, H, W, I] with kernel [KH, KW, I, O]; same padding, no bias."""
    return jax.lax.conv_general_dilated(
        x,
        kernel.astype(x.dtype),
        (stride, stride),
        "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )


def batch_norm(params: Params, state: Params, x: jax.Array) -> tuple[jax.Array, Params]:
    """Normalise x [N, H, W, C] by its statistics; update their running averages."""
    wide = x.astype(jnp.float32)
    mean = wide.mean((0, 1, 2))
    variance = jnp.square(wide - mean).mean((0, 1, 2))
    wide = (wide - mean) * jax.lax.rsqrt(variance + 1e-5)
    wide = wide * params["scale"] + params["bias"]
    new = {"mean": mean, "variance": variance}
    state = jax.tree.map(lambda old, new: _MOMENTUM * old + 0.1 * new, state, new)
    return wide.astype(x.dtype), state


def conv_norm_weights(size: int, inputs: int, outputs: int) -> Params:
    """Return the weights of a convolution followed by BatchNorm."""
    return {
        "kernel": weights.normal(
            size, size, inputs, outputs, fan_in=size * size * outputs // 2
        ),
        "scale": weights.ones(outputs),
        "bias": weights.zeros(outputs),
    }


def block_weights(
    config: WideResNetConfig, inputs: int, channels: int, stride: int
) -> Params:
    """Return the weights of one bottleneck."""
    inner, outputs = channels * config.width, channels * _EXPANSION
    reduced = inner if config.widens == "inside" else channels
    params = {
        "reduce": conv_norm_weights(1, inputs, reduced),
        "spatial": conv_norm_weights(3, reduced, inner),
        "expand": conv_norm_weights(1, inner, outputs),
    }
    if stride > 1 or inputs != outputs:
        params["shortcut"] = conv_norm_weights(1, inputs, outputs)
    return params


def statistics(conv_norm: Params) -> Params:
    """Return the initial state of one BatchNorm: mean 0 and variance 1."""
    outputs = conv_norm["scale"].shape[0]
    return {"mean": weights.zeros(outputs), "variance": weights.ones(outputs)}


def block(
    params: Params, state: Params, x: jax.Array, stride: int
) -> tuple[jax.Array, Params]:
    """Apply a residual bottleneck; return the result and new statistics."""
    new: Params = {}

    def conv_norm(name: str, x: jax.Array, stride: int = 1) -> jax.Array:
        x = conv(x, params[name]["kernel"], stride)
        x, new[name] = batch_norm(params[name], state[name], x)
        return x

    hidden = jax.nn.relu(conv_norm("reduce", x))
    hidden = jax.nn.relu(conv_norm("spatial", hidden, stride))
    hidden = conv_norm("expand", hidden)
    if "shortcut" in params:
        x = conv_norm("shortcut", x, stride)
    return jax.nn.relu(x + hidden), new


def describe(config: WideResNetConfig) -> tuple[Params, Params]:
    """Return the weights of the parameters and of BatchNorm's state."""
    stages = config.stages()
    features = stages[-1][1] * _EXPANSION
    stem = conv_norm_weights(7 if config.stem == "imagenet" else 3, 3, config.channels)
    blocks = tuple(block_weights(config, *stage) for stage in stages)
    params = {
        "stem": stem,
        "blocks": blocks,
        "head": weights.normal(features, config.num_classes),
        "head_bias": weights.zeros(config.num_classes),
    }
    states = tuple({name: statistics(p) for name, p in b.items()} for b in blocks)
    return params, {"stem": statistics(stem), "blocks": states}


def max_pool(x: jax.Array) -> jax.Array:
    """Apply 3x3 max-pooling with stride 2: x [N, H, W, C] to [N, H/2, W/2, C]."""
    return jax.lax.reduce_window(
        x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME"
    )


def loss(
    config: WideResNetConfig, params: Params, state: Params, batch: Params
) -> tuple[jax.Array, Params]:
    """Return the mean cross entropy of the classes, and the new BatchNorm state."""
    x = batch["images"].astype(config.dtype)
    x = conv(x, params["stem"]["kernel"], 2 if config.stem == "imagenet" else 1)
    x, stem_state = batch_norm(params["stem"], state["stem"], x)
    x = jax.nn.relu(x)
    if config.stem == "imagenet":
        x = max_pool(x)
    states = []
    for p, s, (_, _, stride) in zip(
        params["blocks"], state["blocks"], config.stages(), strict=True
    ):
        x, new = block(p, s, x, stride)
        states.append(new)
    x = x.mean((1, 2)).astype(jnp.float32)
    logits = x @ params["head"] + params["head_bias"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
    return losses.mean(), {"stem": stem_state, "blocks": tuple(states)}


def make_batch(config: WideResNetConfig, key: jax.Array) -> Params:
    """Return random images [N, H, W, 3] and class labels [N]."""
    images, labels = jax.random.split(key)
    size = config.image_size
    return {
        "images": jax.random.normal(images, (config.batch, size, size, 3)),
        "labels": jax.random.randint(labels, (config.batch,), 0, config.num_classes),
    }
