"""Two towers, image and text, trained to agree on the pairs of a batch.

Vision transformer over patches, causal text transformer, symmetric in-batch
InfoNCE with a learned temperature.

Source: Radford et al. 2021 (CLIP), section 2.4 and table 20.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp

from rhino_jax.models import gpt, layers as nn, weights
from rhino_jax.models.config import StackConfig, divides
from rhino_jax.models.layers import Params
from rhino_jax.models.weights import Weight


@dataclass(frozen=True, kw_only=True)
class TwoTowerConfig(StackConfig):
    """Sizes of both towers; both have blocks with d_ff = 4 d_model.

    Attributes:
      patch: side of a patch in pixels.
      pool: whether the image's vector is that of a class token, or the patches' mean.
      d_embed: size of the space that both towers map into.
    """

    image_size: int
    patch: int
    image_layers: int
    image_d_model: int
    image_heads: int
    vocab: int
    text_len: int
    text_layers: int
    text_d_model: int
    text_heads: int
    d_embed: int
    pool: Literal["class", "mean"] = "class"

    @property
    def image_len(self) -> int:
        """Number of patches, plus one for a class token."""
        return (self.image_size // self.patch) ** 2 + (self.pool == "class")

    def conflicts(self) -> Iterator[tuple[str, str]]:
        yield from super().conflicts()
        yield from divides(self.image_size, self.patch, "patch", "image_size")
        yield from divides(
            self.image_d_model, self.image_heads, "image_heads", "image_d_model"
        )
        yield from divides(
            self.text_d_model, self.text_heads, "text_heads", "text_d_model"
        )


def tower_weights(
    config: TwoTowerConfig, layers: int, d_model: int, heads: int, length: int
) -> Params:
    """Return the weights that both towers have."""
    block = gpt.block_weights(d_model, heads, 4 * d_model)
    return {
        "position": Weight((length, d_model), std=0.02),
        "blocks": weights.stack(block, layers, config.layers),
        "ln_final": weights.norm(d_model),
        "out": weights.normal(d_model, config.d_embed),
    }


def describe(config: TwoTowerConfig) -> Params:
    """Return the weights of the parameters."""
    width = config.image_d_model
    image = tower_weights(
        config, config.image_layers, width, config.image_heads, config.image_len
    )
    image["patch"] = weights.normal(
        config.patch, config.patch, 3, width, fan_in=3 * config.patch**2
    )
    image["ln_first"] = weights.norm(width)
    if config.pool == "class":
        image["class"] = Weight((width,), std=0.02)
    width = config.text_d_model
    text = tower_weights(
        config, config.text_layers, width, config.text_heads, config.text_len
    )
    text["embed"] = Weight((config.vocab, width), std=0.02)
    log_scale = Weight((), std=0.0, mean=math.log(1 / 0.07))
    return {"image": image, "text": text, "log_scale": log_scale}


def run_blocks(
    config: TwoTowerConfig, params: Params, x: jax.Array, mask: jax.Array | None
) -> jax.Array:
    """Apply a tower's blocks and last LayerNorm: x [B, S, D] to [B, S, D]."""
    x = nn.run_stack(
        config,
        lambda p, x: gpt.block(p, x, mask),
        params["blocks"],
        x,
    )
    return nn.layer_norm(nn.cast(params["ln_final"], x.dtype), x)


def encode_image(
    config: TwoTowerConfig, params: Params, images: jax.Array
) -> jax.Array:
    """Return unit vectors of images: [B, H, W, 3] to [B, d_embed]."""
    x = jax.lax.conv_general_dilated(
        images.astype(config.dtype),
        params["patch"].astype(config.dtype),
        (config.patch, config.patch),
        "VALID",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    x = x.reshape(x.shape[0], -1, x.shape[-1])
    if config.pool == "class":
        start = jnp.broadcast_to(params["class"], (x.shape[0], 1, x.shape[-1]))
        x = jnp.concatenate([start.astype(x.dtype), x], axis=1)
    x = x + params["position"].astype(x.dtype)
    x = nn.layer_norm(nn.cast(params["ln_first"], x.dtype), x)
    x = run_blocks(config, params, x, None)
    pooled = x[:, 0] if config.pool == "class" else x.mean(1)
    return unit(jnp.einsum("bd,de->be", pooled, params["out"].astype(x.dtype)))


def encode_text(config: TwoTowerConfig, params: Params, tokens: jax.Array) -> jax.Array:
    """Return unit vectors of texts: [B, S] to [B, d_embed].

    A text's vector is that of its end token, which has the highest id.
    """
    x = (params["embed"][tokens] + params["position"]).astype(config.dtype)
    x = run_blocks(config, params, x, nn.causal_mask(config.text_len))
    end = jnp.argmax(tokens, axis=1)
    pooled = jnp.take_along_axis(x, end[:, None, None], axis=1)[:, 0]
    return unit(jnp.einsum("bd,de->be", pooled, params["out"].astype(x.dtype)))


def unit(x: jax.Array) -> jax.Array:
    """Normalise rows to length 1, in float32."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + 1e-12)


def loss(config: TwoTowerConfig, params: Params, batch: Params) -> jax.Array:
    """Return the symmetric cross entropy of the pairs among all pairs of the batch."""
    images = encode_image(config, params["image"], batch["images"])
    texts = encode_text(config, params["text"], batch["tokens"])
    logits = jnp.exp(params["log_scale"]) * jnp.einsum("ae,be->ab", images, texts)
    pairs = jnp.arange(logits.shape[0])
    of_image = nn.cross_entropy(logits, pairs)
    return (of_image + nn.cross_entropy(logits.T, pairs)) / 2


def make_batch(config: TwoTowerConfig, key: jax.Array) -> Params:
    """Return random images [B, H, W, 3] and texts [B, S]."""
    images, tokens = jax.random.split(key)
    size = config.image_size
    return {
        "images": jax.random.normal(images, (config.batch, size, size, 3)),
        "tokens": jax.random.randint(
            tokens, (config.batch, config.text_len), 0, config.vocab
        ),
    }
