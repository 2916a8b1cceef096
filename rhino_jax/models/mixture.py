"""Dropless mixture of experts: LLaMA blocks whose perceptron is chosen per token.

Tokens are sorted by expert, and each expert multiplies as many as chose it
(`jax.lax.ragged_dot`); none is left out. An auxiliary loss balances the load.

Source: Jiang et al. 2024 (Mixtral), section 2.1; Gale et al. 2023 (MegaBlocks), section
3; Qwen Team 2025 (Qwen3), table 2; the auxiliary loss: Fedus et al. 2022 (Switch
Transformer), section 2.2; attention over latents, and an expert that all tokens take:
DeepSeek-AI 2024 (DeepSeek-V2), sections 2.1 and 2.2.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from rhino_jax.models import layers as nn, llama, weights
from rhino_jax.models.layers import Params


@dataclass(frozen=True, kw_only=True)
class MixtureConfig(llama.LlamaConfig):
    """Sizes of a mixture: E num_experts, F d_ff, the width of one expert.

    Attributes:
      top_k: number of experts per token.
      d_shared: width of the expert that all tokens take; 0: there is none.
      aux_weight: weight of the balancing loss.
      latent_size: width of the latents that keys and values are made of (multi-head
        latent attention); 0: keys and values are made of activations.
      query_latent_size, rope_size: width of the queries' latents, and of the part of
        queries and keys that is rotated; with `latent_size` alone.
    """

    num_experts: int
    top_k: int = 2
    d_shared: int = 0
    aux_weight: float = 0.01
    latent_size: int = 0
    query_latent_size: int = 0
    rope_size: int = 0

    def conflicts(self) -> Iterator[tuple[str, str]]:
        yield from super().conflicts()
        if self.top_k > self.num_experts:
            yield "top_k", f"at most num_experts = {self.num_experts}"
        if self.latent_size and (self.rope_size % 2 or not self.query_latent_size):
            yield "latent_size", "with query_latent_size, and an even rope_size"
        if self.latent_size and self.attention != "xla":
            yield "attention", "'xla' with latent_size, which is plain operations"


def experts(
    config: MixtureConfig, params: Params, x: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Apply the routed perceptrons.

    Returns:
      The result, and the balancing loss: 1 if the load is balanced.
    Shapes:
      x and the result [B, S, D]; params: router [D, E]; gate, up [E, D, F];
      down [E, F, D].
    """
    rows = x.reshape(-1, x.shape[-1])
    scores = rows.astype(jnp.float32) @ params["router"].astype(jnp.float32)
    gates = jax.nn.softmax(scores, axis=-1)
    kept, chosen = jax.lax.top_k(gates, config.top_k)
    kept = kept / kept.sum(-1, keepdims=True)
    order = jnp.argsort(chosen.reshape(-1))
    counts = jnp.bincount(chosen.reshape(-1), length=config.num_experts)
    sent = rows[order // config.top_k]
    gate = jax.nn.silu(jax.lax.ragged_dot(sent, params["gate"], counts))
    hidden = gate * jax.lax.ragged_dot(sent, params["up"], counts)
    done = jax.lax.ragged_dot(hidden, params["down"], counts)
    done = done * kept.reshape(-1)[order, None].astype(x.dtype)
    mixed = jnp.zeros_like(rows).at[order // config.top_k].add(done)
    load = jax.nn.one_hot(chosen, config.num_experts).mean((0, 1))
    balance = config.num_experts * jnp.sum(load * gates.mean(0))
    return mixed.reshape(x.shape), balance


def latent_attention(
    config: MixtureConfig, params: Params, x: jax.Array, mask: jax.Array
) -> jax.Array:
    """Apply multi-head latent attention: x [B, S, D] to [B, S, D].

    Keys and values of all heads are made of one latent per position, and a part of the
    keys, which alone is rotated, is shared by the heads.
    """
    latent = nn.rms_norm(params["norm_q"], x @ params["q_latent"])
    q = jnp.einsum("bsr,rhk->bshk", latent, params["q"])
    latent = nn.rms_norm(params["norm_kv"], x @ params["kv_latent"])
    k = jnp.einsum("bsr,rhk->bshk", latent, params["k"])
    v = jnp.einsum("bsr,rhk->bshk", latent, params["v"])
    rotated = llama.rope(x @ params["k_rope"], config.rope_theta)
    width = k.shape[-1]
    near = llama.rope(q[..., width:], config.rope_theta)
    scores = jnp.einsum("bqhk,bshk->bhqs", q[..., :width], k)
    scores = scores + jnp.einsum("bqhk,bsk->bhqs", near, rotated)
    scores = scores.astype(jnp.float32) * q.shape[-1] ** -0.5
    chances = jax.nn.softmax(jnp.where(mask, scores, -1e9), axis=-1).astype(v.dtype)
    mixed = jnp.einsum("bhqs,bshk->bqhk", chances, v)
    return jnp.einsum("bqhk,hkd->bqd", mixed, params["out"])


def attention_weights(config: MixtureConfig) -> Params:
    """Return weights as `llama.attention_weights`; or of latents: q_latent [D, Cq];
    q [Cq, H, K + P]; kv_latent [D, C]; k, v [C, H, K]; k_rope [D, P]; out [H, K, D].
    """
    if not config.latent_size:
        return llama.attention_weights(config)
    d_model, heads, d_head = config.d_model, config.num_heads, config.d_head
    latent, latent_q = config.latent_size, config.query_latent_size
    return {
        "q_latent": weights.normal(d_model, latent_q),
        "norm_q": weights.ones(latent_q),
        "q": weights.normal(
            latent_q, heads, d_head + config.rope_size, fan_in=latent_q
        ),
        "kv_latent": weights.normal(d_model, latent),
        "norm_kv": weights.ones(latent),
        "k": weights.normal(latent, heads, d_head, fan_in=latent),
        "v": weights.normal(latent, heads, d_head, fan_in=latent),
        "k_rope": weights.normal(d_model, config.rope_size),
        "out": weights.normal(heads, d_head, d_model),
    }


def block_weights(config: MixtureConfig) -> Params:
    """Return weights of attention, of the router [D, E], of the experts, and norms."""
    d_model, num = config.d_model, config.num_experts
    found = {
        "norm_attention": weights.ones(d_model),
        "attention": attention_weights(config),
        "norm_mlp": weights.ones(d_model),
        "experts": {
            "router": weights.normal(d_model, num),
            **llama.swiglu_weights(d_model, config.d_ff, num),
        },
    }
    if config.d_shared:
        found["shared"] = llama.swiglu_weights(d_model, config.d_shared)
    return found


def block(
    config: MixtureConfig,
    params: Params,
    carry: tuple[jax.Array, jax.Array],
    mask: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Apply a pre-norm block; the carry is (x [B, S, D], sum of balancing losses)."""
    x, balance_sum = carry
    p = nn.cast(params, x.dtype)
    normed = nn.rms_norm(p["norm_attention"], x)
    if config.latent_size:
        x = x + latent_attention(config, p["attention"], normed, mask)
    else:
        x = x + llama.grouped_attention(
            p["attention"], normed, mask, config.rope_theta, config.attention
        )
    normed = nn.rms_norm(p["norm_mlp"], x)
    routed, balance = experts(config, p["experts"], normed)
    if config.d_shared:
        routed = routed + llama.swiglu(p["shared"], normed)
    return x + routed, balance_sum + balance


def describe(config: MixtureConfig) -> Params:
    """Return the weights of the parameters."""
    return llama.describe(config, block_weights(config))


def loss(config: MixtureConfig, params: Params, batch: Params) -> jax.Array:
    """Return the mean next-token cross entropy plus the weighted balancing loss."""
    mask = nn.causal_mask(config.seq_len)
    x = params["embed"][batch["tokens"]].astype(config.dtype)
    x, balance_sum = nn.run_stack(
        config,
        lambda p, carry: block(config, p, carry, mask),
        params["blocks"],
        (x, jnp.zeros((), jnp.float32)),
    )
    x = nn.rms_norm(params["norm_final"].astype(config.dtype), x)
    entropy = nn.cross_entropy(nn.token_scores(config, params, x), batch["labels"])
    return entropy + config.aux_weight * balance_sum / config.num_layers


make_batch = nn.token_batch
