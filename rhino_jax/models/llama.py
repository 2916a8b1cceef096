"""LLaMA: grouped-query attention, rotary positions, SwiGLU, RMSNorm.

Source: Touvron et al. 2023 (LLaMA); Grattafiori et al. 2024 (Llama 3), table 3;
Qwen Team 2025 (Qwen3), section 2: norms of queries and keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from rhino_jax.models import layers as nn, weights
from rhino_jax.models.config import DecoderConfig, divides, positive
from rhino_jax.models.layers import Params
from rhino_jax.models.weights import Weight


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(DecoderConfig):
    """Sizes of Llama: G num_kv_heads.

    Each of the G key/value heads serves R = num_heads / num_kv_heads query heads.

    Attributes:
      rope_theta: base of the rotary frequencies.
      tied_embedding: whether the output uses the embedding's transpose.
      head_size: width of a head; 0: d_model / num_heads.
      norms_heads: whether each head's queries and keys are normalized by RMSNorm.
    """

    num_kv_heads: int
    rope_theta: float = 10000.0
    tied_embedding: bool = False
    head_size: int = 0
    norms_heads: bool = False

    @property
    def d_head(self) -> int:
        return self.head_size or self.d_model // self.num_heads

    def conflicts(self) -> Iterator[tuple[str, str]]:
        yield from super().conflicts()
        yield from positive(self, "rope_theta")
        yield from divides(
            self.num_heads, self.num_kv_heads, "num_kv_heads", "num_heads"
        )
        if self.d_head % 2:
            yield "num_heads", "such that d_model / num_heads is even, for RoPE"


def rope(x: jax.Array, theta: float) -> jax.Array:
    """Rotate the two halves of the last dim by an angle that grows with the position.

    Shapes:
      x [B, S, ..., K], K even.
    """
    half = x.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] * frequency
    angle = angle.reshape(x.shape[1], *(1,) * (x.ndim - 3), half)
    sin, cos = jnp.sin(angle).astype(x.dtype), jnp.cos(angle).astype(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate(
        [first * cos - second * sin, second * cos + first * sin], axis=-1
    )


def plain_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array
) -> jax.Array:
    """Apply attention to q [B, S, G, R, K], k and v [B, S, G, K], as plain operations;
    the result is shaped as q."""
    scores = jnp.einsum("bqgrk,bsgk->bgrqs", q, k).astype(jnp.float32)
    scores = jnp.where(mask, scores * q.shape[-1] ** -0.5, -1e9)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("bgrqs,bsgk->bqgrk", weights, v)


def grouped_attention(
    params: Params, x: jax.Array, mask: jax.Array, theta: float, form: str = "xla"
) -> jax.Array:
    """Apply grouped-query self-attention: x [B, S, D] to [B, S, D]."""
    q = jnp.einsum("bsd,dgrk->bsgrk", x, params["q"])
    k = jnp.einsum("bsd,dgk->bsgk", x, params["k"])
    if "norm_q" in params:
        q, k = nn.rms_norm(params["norm_q"], q), nn.rms_norm(params["norm_k"], k)
    q, k = rope(q, theta), rope(k, theta)
    v = jnp.einsum("bsd,dgk->bsgk", x, params["v"])
    mixed = nn.in_form(form, plain_attention)(q, k, v, mask)
    return jnp.einsum("bqgrk,grkd->bqd", mixed, params["out"])


def swiglu(params: Params, x: jax.Array) -> jax.Array:
    """Apply a gated perceptron: x [B, S, D] to [B, S, D]."""
    gate = jax.nn.silu(jnp.einsum("bsd,df->bsf", x, params["gate"]))
    up = jnp.einsum("bsd,df->bsf", x, params["up"])
    return jnp.einsum("bsf,fd->bsd", gate * up, params["down"])


def attention_weights(config: LlamaConfig) -> Params:
    """Return weights: q [D, G, R, K]; k, v [D, G, K]; out [G, R, K, D]; norms [K]."""
    d_model, d_head, groups = config.d_model, config.d_head, config.num_kv_heads
    repeats = config.num_heads // groups
    found = {
        "q": weights.normal(d_model, groups, repeats, d_head, fan_in=d_model),
        "k": weights.normal(d_model, groups, d_head, fan_in=d_model),
        "v": weights.normal(d_model, groups, d_head, fan_in=d_model),
        "out": weights.normal(
            groups, repeats, d_head, d_model, fan_in=config.num_heads * d_head
        ),
    }
    if config.norms_heads:
        found |= {"norm_q": weights.ones(d_head), "norm_k": weights.ones(d_head)}
    return found


def swiglu_weights(d_model: int, d_ff: int, *experts: int) -> Params:
    """Return weights of gated perceptrons: gate, up [..., D, F]; down [..., F, D]."""
    return {
        "gate": weights.normal(*experts, d_model, d_ff, fan_in=d_model),
        "up": weights.normal(*experts, d_model, d_ff, fan_in=d_model),
        "down": weights.normal(*experts, d_ff, d_model, fan_in=d_ff),
    }


def block_weights(config: LlamaConfig) -> Params:
    """Return weights of attention, of a gated perceptron, and of their norms [D]."""
    d_model = config.d_model
    return {
        "norm_attention": weights.ones(d_model),
        "attention": attention_weights(config),
        "norm_mlp": weights.ones(d_model),
        "mlp": swiglu_weights(d_model, config.d_ff),
    }


def block(
    params: Params, x: jax.Array, mask: jax.Array, theta: float, form: str = "xla"
) -> jax.Array:
    """Apply a pre-norm block: x [B, S, D] to [B, S, D]; computes in x's type."""
    p = nn.cast(params, x.dtype)
    normed = nn.rms_norm(p["norm_attention"], x)
    x = x + grouped_attention(p["attention"], normed, mask, theta, form)
    return x + swiglu(p["mlp"], nn.rms_norm(p["norm_mlp"], x))


def describe(config: LlamaConfig, block: Params | None = None) -> Params:
    """Return the weights of the parameters.

    Args:
      config: the sizes.
      block: weights of one block; None: `block_weights`.
    """
    d_model, vocab = config.d_model, config.vocab
    block = block or block_weights(config)
    params = {
        "embed": Weight((vocab, d_model), std=0.02),
        "blocks": weights.stack(block, config.num_layers, config.layers),
        "norm_final": weights.ones(d_model),
    }
    if not config.tied_embedding:
        params["head"] = weights.normal(d_model, vocab)
    return params


def logits(config: LlamaConfig, params: Params, tokens: jax.Array) -> jax.Array:
    """Return next-token scores: tokens [B, S] to [B, S, V]."""
    mask = nn.causal_mask(tokens.shape[1])
    x = nn.run_stack(
        config,
        lambda p, x: block(p, x, mask, config.rope_theta, config.attention),
        params["blocks"],
        params["embed"][tokens].astype(config.dtype),
    )
    x = nn.rms_norm(params["norm_final"].astype(config.dtype), x)
    return nn.token_scores(config, params, x)


def loss(config: LlamaConfig, params: Params, batch: Params) -> jax.Array:
    """Return the mean next-token cross entropy."""
    return nn.cross_entropy(logits(config, params, batch["tokens"]), batch["labels"])


make_batch = nn.token_batch
