"""U-Net with skip connections, timestep embedding and a denoising loss.

The noise is drawn inside the step, from a seed in the batch.

Source: Ho et al. 2020 (DDPM), appendix B, and its released model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp

from rhino_jax.models import weights
from rhino_jax.models.config import TrainConfig, divides
from rhino_jax.models.layers import Params
from rhino_jax.models.wide_resnet import conv


@dataclass(frozen=True, kw_only=True)
class UNetConfig(TrainConfig):
    """Sizes: images [N, image_size, image_size, image_channels].

    Attributes:
      channels: channels of the outermost level.
      multipliers: factors of `channels`, one per level; a level halves the image.
      blocks: residual blocks per level on the way down, one more on the way up.
      attention_size: image size at which residual blocks are followed by attention.
      groups: groups of GroupNorm.
      upsample: repeat pixels and convolve, or transposed convolution.
      num_timesteps: number of timesteps of the diffusion.
    """

    image_size: int
    image_channels: int = 3
    channels: int
    multipliers: tuple[int, ...]
    blocks: int
    attention_size: int
    groups: int = 32
    upsample: Literal["repeat", "transpose"] = "repeat"
    num_timesteps: int = 1000

    def conflicts(self) -> Iterator[tuple[str, str]]:
        yield from super().conflicts()
        yield from divides(self.channels, self.groups, "groups", "channels")
        if self.channels % 2 or self.channels < 4:
            yield "channels", "an even number >= 4, for sines and cosines of time"
        halvings = 2 ** (len(self.multipliers) - 1)
        if self.image_size % halvings:
            yield "image_size", f"a multiple of {halvings}, halved at each level"


def conv_weights(size: int, inputs: int, outputs: int) -> Params:
    """Return a kernel [size, size, I, O] and a bias [O]."""
    fan_in = size * size * inputs
    return {
        "kernel": weights.normal(size, size, inputs, outputs, fan_in=fan_in),
        "bias": weights.zeros(outputs),
    }


def apply_conv(params: Params, x: jax.Array, stride: int = 1) -> jax.Array:
    """Apply a convolution: x [N, H, W, I] to [N, H/stride, W/stride, O]."""
    return conv(x, params["kernel"], stride) + params["bias"].astype(x.dtype)


def group_norm(params: Params, x: jax.Array, groups: int) -> jax.Array:
    """Apply GroupNorm to x [N, H, W, C], in float32."""
    wide = x.astype(jnp.float32).reshape(*x.shape[:3], groups, -1)
    mean = wide.mean((1, 2, 4), keepdims=True)
    variance = jnp.square(wide - mean).mean((1, 2, 4), keepdims=True)
    wide = ((wide - mean) * jax.lax.rsqrt(variance + 1e-6)).reshape(x.shape)
    return (wide * params["scale"] + params["bias"]).astype(x.dtype)


def residual_weights(config: UNetConfig, inputs: int, outputs: int) -> Params:
    """Return two convolutions, the timestep's projection, perhaps a shortcut."""
    d_time = 4 * config.channels
    params = {
        "norm_first": weights.norm(inputs),
        "first": conv_weights(3, inputs, outputs),
        "time": weights.normal(d_time, outputs),
        "time_bias": weights.zeros(outputs),
        "norm_second": weights.norm(outputs),
        "second": conv_weights(3, outputs, outputs),
    }
    if inputs != outputs:
        params["shortcut"] = conv_weights(1, inputs, outputs)
    return params


def residual(params: Params, x: jax.Array, time: jax.Array, groups: int) -> jax.Array:
    """Apply a residual block: x [N, H, W, I] and time [N, 4 C] to [N, H, W, O]."""
    hidden = jax.nn.silu(group_norm(params["norm_first"], x, groups))
    hidden = apply_conv(params["first"], hidden)
    shift = jnp.einsum("nt,to->no", jax.nn.silu(time), params["time"].astype(x.dtype))
    shift = shift + params["time_bias"].astype(x.dtype)
    hidden = hidden + shift[:, None, None, :]
    hidden = jax.nn.silu(group_norm(params["norm_second"], hidden, groups))
    hidden = apply_conv(params["second"], hidden)
    return hidden + (apply_conv(params["shortcut"], x) if "shortcut" in params else x)


def attention_weights(channels: int) -> Params:
    """Return q, k, v and out, [1, 1, C, C] with a bias each."""
    convs = {n: conv_weights(1, channels, channels) for n in ("q", "k", "v", "out")}
    return {"norm": weights.norm(channels), **convs}


def attend(params: Params, x: jax.Array, groups: int) -> jax.Array:
    """Apply residual single-head attention between all pixels of x [N, H, W, C]."""
    normed = group_norm(params["norm"], x, groups)
    q, k, v = (apply_conv(params[name], normed) for name in ("q", "k", "v"))
    scores = jnp.einsum("nhwc,nyxc->nhwyx", q, k).astype(jnp.float32)
    scores = scores * x.shape[-1] ** -0.5
    weights = jax.nn.softmax(scores, axis=(3, 4)).astype(x.dtype)
    mixed = jnp.einsum("nhwyx,nyxc->nhwc", weights, v)
    return x + apply_conv(params["out"], mixed)


def upsample_weights(config: UNetConfig, channels: int) -> Params:
    """Return a 3x3 convolution for repeated pixels, or a transposed one of 2x2."""
    return conv_weights(3 if config.upsample == "repeat" else 2, channels, channels)


def upsample(config: UNetConfig, params: Params, x: jax.Array) -> jax.Array:
    """Double the image: x [N, H, W, C] to [N, 2 H, 2 W, C]."""
    if config.upsample == "repeat":
        return apply_conv(params, x.repeat(2, axis=1).repeat(2, axis=2))
    x = jax.lax.conv_transpose(
        x,
        params["kernel"].astype(x.dtype),
        (2, 2),
        "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    return x + params["bias"].astype(x.dtype)


def describe(config: UNetConfig) -> Params:
    """Return the weights of the parameters; `down` and `up` have one tree per level."""
    base, size = config.channels, config.image_size

    def stage(inputs: int, outputs: int, size: int) -> Params:
        params = {"residual": residual_weights(config, inputs, outputs)}
        if size == config.attention_size:
            params["attention"] = attention_weights(outputs)
        return params

    skips, channels, down = [base], base, []
    for level, multiplier in enumerate(config.multipliers):
        stages = []
        for _ in range(config.blocks):
            stages.append(stage(channels, base * multiplier, size))
            channels = base * multiplier
            skips.append(channels)
        params: Params = {"stages": tuple(stages)}
        if level + 1 < len(config.multipliers):
            params["downsample"] = conv_weights(3, channels, channels)
            skips.append(channels)
            size //= 2
        down.append(params)
    middle = {
        "first": residual_weights(config, channels, channels),
        "attention": attention_weights(channels),
        "second": residual_weights(config, channels, channels),
    }
    up = []
    for level, multiplier in reversed(list(enumerate(config.multipliers))):
        stages = []
        for _ in range(config.blocks + 1):
            stages.append(stage(channels + skips.pop(), base * multiplier, size))
            channels = base * multiplier
        params = {"stages": tuple(stages)}
        if level:
            params["upsample"] = upsample_weights(config, channels)
            size *= 2
        up.append(params)
    return {
        "time_in": weights.normal(base, 4 * base),
        "time_in_bias": weights.zeros(4 * base),
        "time_out": weights.normal(4 * base, 4 * base, fan_in=4 * base),
        "time_out_bias": weights.zeros(4 * base),
        "conv_in": conv_weights(3, config.image_channels, base),
        "down": tuple(down),
        "middle": middle,
        "up": tuple(up),
        "norm_out": weights.norm(channels),
        "conv_out": conv_weights(3, channels, config.image_channels),
    }


def embed_time(config: UNetConfig, params: Params, timestep: jax.Array) -> jax.Array:
    """Apply sines and cosines, then two dense layers: timestep [N] to [N, 4 C]."""
    half = config.channels // 2
    frequency = jnp.exp(-math.log(10000) * jnp.arange(half) / (half - 1))
    angle = timestep[:, None] * frequency
    x = jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1)
    x = jnp.einsum("nc,ct->nt", x, params["time_in"]) + params["time_in_bias"]
    x = jnp.einsum("nt,tu->nu", jax.nn.silu(x), params["time_out"])
    return (x + params["time_out_bias"]).astype(config.dtype)


def forward(
    config: UNetConfig, params: Params, images: jax.Array, timestep: jax.Array
) -> jax.Array:
    """Predict noise: images [N, H, W, C] and timestep [N] to [N, H, W, C]."""
    time = embed_time(config, params, timestep)

    def stage(params: Params, x: jax.Array) -> jax.Array:
        x = residual(params["residual"], x, time, config.groups)
        if "attention" in params:
            x = attend(params["attention"], x, config.groups)
        return x

    x = apply_conv(params["conv_in"], images.astype(config.dtype))
    skips = [x]
    for level in params["down"]:
        for stage_params in level["stages"]:
            x = stage(stage_params, x)
            skips.append(x)
        if "downsample" in level:
            x = apply_conv(level["downsample"], x, stride=2)
            skips.append(x)
    middle = params["middle"]
    x = residual(middle["first"], x, time, config.groups)
    x = attend(middle["attention"], x, config.groups)
    x = residual(middle["second"], x, time, config.groups)
    for level in params["up"]:
        for stage_params in level["stages"]:
            x = stage(stage_params, jnp.concatenate([x, skips.pop()], axis=-1))
        if "upsample" in level:
            x = upsample(config, level["upsample"], x)
    x = jax.nn.silu(group_norm(params["norm_out"], x, config.groups))
    return apply_conv(params["conv_out"], x)


def loss(config: UNetConfig, params: Params, batch: Params) -> jax.Array:
    """Return the mean squared error of the noise predicted at a random timestep."""
    images = batch["images"]
    time_key, noise_key = jax.random.split(jax.random.key(batch["seed"]))
    timestep = jax.random.randint(time_key, images.shape[:1], 0, config.num_timesteps)
    noise = jax.random.normal(noise_key, images.shape)
    beta = jnp.linspace(1e-4, 0.02, config.num_timesteps)
    signal = jnp.cumprod(1 - beta)[timestep][:, None, None, None]
    noisy = jnp.sqrt(signal) * images + jnp.sqrt(1 - signal) * noise
    predicted = forward(config, params, noisy, timestep.astype(jnp.float32))
    return jnp.mean(jnp.square(predicted.astype(jnp.float32) - noise))


def make_batch(config: UNetConfig, key: jax.Array) -> Params:
    """Return random images [N, H, W, C], and the seed of the step's noise."""
    size = config.image_size
    shape = (config.batch, size, size, config.image_channels)
    return {
        "images": jax.random.normal(key, shape),
        "seed": jax.random.randint(key, (), 0, 2**31 - 1),
    }
