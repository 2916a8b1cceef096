"""GPT: pre-LayerNorm decoder with learned positions, GELU and fused q, k, v.

Source: Radford et al. 2019 (GPT-2); Brown et al. 2020 (GPT-3), section 2.1.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from rhino_jax.models import layers as nn, weights
from rhino_jax.models.config import DecoderConfig
from rhino_jax.models.layers import Params
from rhino_jax.models.weights import Weight


@dataclass(frozen=True, kw_only=True)
class GPTConfig(DecoderConfig):
    """Sizes of GPT.

    Attributes:
      tied_embedding: whether the output uses the embedding's transpose.
    """

    tied_embedding: bool = True


def block_weights(d_model: int, num_heads: int, d_ff: int) -> Params:
    """Return a block's weights: qkv [D, 3, H, K]; out [H, K, D]; MLP [D, F], [F, D]."""
    heads, d_head = num_heads, d_model // num_heads
    return {
        "ln_attention": weights.norm(d_model),
        "attention": {
            "qkv": weights.normal(d_model, 3, heads, d_head, fan_in=d_model),
            "qkv_bias": weights.zeros(3, heads, d_head),
            "out": weights.normal(heads, d_head, d_model, fan_in=d_model),
            "out_bias": weights.zeros(d_model),
        },
        "ln_mlp": weights.norm(d_model),
        "mlp": {
            "up": weights.normal(d_model, d_ff),
            "up_bias": weights.zeros(d_ff),
            "down": weights.normal(d_ff, d_model),
            "down_bias": weights.zeros(d_model),
        },
    }


def plain_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None
) -> jax.Array:
    """Apply attention to heads [B, S, H, K], as plain operations."""
    return nn.attention(q, k, v, scale=q.shape[-1] ** -0.5, mask=mask)


def self_attention(
    params: Params, x: jax.Array, mask: jax.Array | None, form: str = "xla"
) -> jax.Array:
    """Apply multi-head self-attention: x [B, S, D] to [B, S, D].

    Args:
      form: as `DecoderConfig.attention`; all but "xla" are causal, whatever the mask.
    """
    qkv = jnp.einsum("bsd,dthk->bsthk", x, params["qkv"]) + params["qkv_bias"]
    q, k, v = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
    mixed = nn.in_form(form, plain_attention)(q, k, v, mask)
    return jnp.einsum("bshk,hkd->bsd", mixed, params["out"]) + params["out_bias"]


def mlp(params: Params, x: jax.Array) -> jax.Array:
    """Apply a two-layer perceptron with GELU: x [B, S, D] to [B, S, D]."""
    hidden = jnp.einsum("bsd,df->bsf", x, params["up"]) + params["up_bias"]
    hidden = jax.nn.gelu(hidden)
    return jnp.einsum("bsf,fd->bsd", hidden, params["down"]) + params["down_bias"]


def block(
    params: Params, x: jax.Array, mask: jax.Array | None = None, form: str = "xla"
) -> jax.Array:
    """Apply a pre-LayerNorm block: x [B, S, D] to [B, S, D]; computes in x's type."""
    p = nn.cast(params, x.dtype)
    normed = nn.layer_norm(p["ln_attention"], x)
    x = x + self_attention(p["attention"], normed, mask, form)
    return x + mlp(p["mlp"], nn.layer_norm(p["ln_mlp"], x))


def describe(config: GPTConfig) -> Params:
    """Return the weights of the parameters."""
    d_model = config.d_model
    block = block_weights(d_model, config.num_heads, config.d_ff)
    params = {
        "embed": Weight((config.vocab, d_model), std=0.02),
        "position": Weight((config.seq_len, d_model), std=0.02),
        "blocks": weights.stack(block, config.num_layers, config.layers),
        "ln_final": weights.norm(d_model),
    }
    if not config.tied_embedding:
        params["head"] = weights.normal(d_model, config.vocab)
    return params


def logits(config: GPTConfig, params: Params, tokens: jax.Array) -> jax.Array:
    """Return next-token scores: tokens [B, S] to [B, S, V]."""
    x = params["embed"][tokens] + params["position"][: tokens.shape[1]]
    x = x.astype(config.dtype)
    mask = nn.causal_mask(tokens.shape[1])
    x = nn.run_stack(
        config,
        lambda p, x: block(p, x, mask, config.attention),
        params["blocks"],
        x,
    )
    x = nn.layer_norm(nn.cast(params["ln_final"], config.dtype), x)
    return nn.token_scores(config, params, x)


def loss(config: GPTConfig, params: Params, batch: Params) -> jax.Array:
    """Return the mean next-token cross entropy."""
    return nn.cross_entropy(logits(config, params, batch["tokens"]), batch["labels"])


make_batch = nn.token_batch
