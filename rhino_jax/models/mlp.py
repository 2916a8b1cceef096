"""A chain of dense layers, for programs whose best plan is known in closed form."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from rhino_jax.models import layers as nn, weights
from rhino_jax.models.config import TrainConfig
from rhino_jax.models.layers import Params


@dataclass(frozen=True, kw_only=True)
class MLPConfig(TrainConfig):
    """Sizes: `depth` layers of [width, width].

    Attributes:
      bias: whether each layer adds a bias [width].
      relu: whether a ReLU follows each layer but the last; without it the chain is
        linear.
    """

    depth: int
    width: int
    bias: bool = True
    relu: bool = True


def describe(config: MLPConfig) -> Params:
    """Return one weight (and bias) per layer."""
    width = config.width
    layer = {"weight": weights.normal(width, width)}
    if config.bias:
        layer["bias"] = weights.zeros(width)
    return {f"layer_{i}": layer for i in range(config.depth)}


def forward(config: MLPConfig, params: Params, x: jax.Array) -> jax.Array:
    """Apply the layers: x [B, width] to [B, width]."""
    for i in range(config.depth):
        layer = nn.cast(params[f"layer_{i}"], x.dtype)
        x = jnp.einsum("bi,io->bo", x, layer["weight"])
        if config.bias:
            x = x + layer["bias"]
        if config.relu and i + 1 < config.depth:
            x = jax.nn.relu(x)
    return x


def loss(config: MLPConfig, params: Params, batch: Params) -> jax.Array:
    """Return the mean squared error."""
    out = forward(config, params, batch["x"].astype(config.dtype))
    return jnp.mean(jnp.square(out.astype(jnp.float32) - batch["y"]))


def make_batch(config: MLPConfig, key: jax.Array) -> Params:
    """Return random inputs and targets, [B, width] each."""
    x, y = jax.random.split(key)
    shape = (config.batch, config.width)
    return {"x": jax.random.normal(x, shape), "y": jax.random.normal(y, shape)}
