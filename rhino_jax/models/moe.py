"""Mixture of experts: GPT blocks whose perceptron is chosen per token.

Top-2 routing by einsums with dispatch and combine tensors, a capacity per expert
and sequence, and a load-balancing loss. Tokens over capacity skip the experts.

Source: Lepikhin et al. 2021 (GShard), section 2.2 and algorithm 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from rhino_jax.models import gpt, layers as nn, weights
from rhino_jax.models.config import DecoderConfig, divides, positive
from rhino_jax.models.layers import Params
from rhino_jax.models.weights import Weight


@dataclass(frozen=True, kw_only=True)
class MoEConfig(DecoderConfig):
    """Sizes: V vocab, S seq_len, D d_model, E num_experts, F d_ff, C capacity.

    Attributes:
      moe_every: the last of this many consecutive layers has experts.
      top_k: number of experts per token.
      capacity_factor: capacity of an expert, relative to a perfectly balanced load.
      aux_weight: weight of the balancing loss.
    """

    num_experts: int
    moe_every: int = 2
    top_k: int = 2
    capacity_factor: float = 1.25
    aux_weight: float = 0.01

    @property
    def capacity(self) -> int:
        """Maximum number of tokens of one sequence per expert."""
        balanced = self.top_k * self.seq_len / self.num_experts
        return max(1, math.ceil(self.capacity_factor * balanced))

    def conflicts(self) -> Iterator[tuple[str, str]]:
        yield from super().conflicts()
        yield from positive(self, "capacity_factor")
        yield from divides(self.num_layers, self.moe_every, "moe_every", "num_layers")
        if self.top_k > self.num_experts:
            yield "top_k", f"at most num_experts = {self.num_experts}"


def route(
    config: MoEConfig, router: jax.Array, x: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Route tokens to experts.

    Returns:
      combine: weight of an expert's slot in a token's result; 0 if not routed there.
      dispatch: `combine > 0`, in x's type.
      balance: the auxiliary loss, 1 if the load is balanced.
    Shapes:
      router [D, E]; x [B, S, D]; combine, dispatch [B, S, E, C].
    """
    scores = jnp.einsum("bsd,de->bse", x.astype(jnp.float32), router)
    gates = jax.nn.softmax(scores, axis=-1)
    _, chosen = jax.lax.top_k(gates, config.top_k)
    combine = jnp.zeros((*gates.shape, config.capacity), jnp.float32)
    kept_gates = jnp.zeros(gates.shape[:2], jnp.float32)
    taken = jnp.zeros((gates.shape[0], 1, config.num_experts), jnp.float32)
    for rank in range(config.top_k):
        mask = jax.nn.one_hot(chosen[..., rank], config.num_experts)
        if rank == 0:
            load, probability = mask.mean((0, 1)), gates.mean((0, 1))
            balance = config.num_experts * jnp.sum(load * probability)
        # Slots are assigned in the order of the sequence, first choices first.
        slot = jnp.cumsum(mask, axis=1) - mask + taken
        taken = taken + mask.sum(1, keepdims=True)
        mask = mask * (slot < config.capacity)
        gate = jnp.sum(gates * mask, axis=-1)
        kept_gates = kept_gates + gate
        position = jnp.sum(slot * mask, axis=-1).astype(jnp.int32)
        in_slot = jax.nn.one_hot(position, config.capacity)
        combine = combine + jnp.einsum("bs,bse,bsc->bsec", gate, mask, in_slot)
    combine = combine / (kept_gates + 1e-9)[:, :, None, None]
    return combine.astype(x.dtype), (combine > 0).astype(x.dtype), balance


def experts(
    config: MoEConfig, params: Params, x: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Apply the routed perceptron: x [B, S, D] to ([B, S, D], balancing loss)."""
    combine, dispatch, balance = route(config, params["router"], x)
    p = nn.cast({"up": params["up"], "down": params["down"]}, x.dtype)
    sent = jnp.einsum("bsec,bsd->ebcd", dispatch, x)
    hidden = jax.nn.gelu(jnp.einsum("ebcd,edf->ebcf", sent, p["up"]))
    done = jnp.einsum("ebcf,efd->ebcd", hidden, p["down"])
    return jnp.einsum("bsec,ebcd->bsd", combine, done), balance


def group_weights(config: MoEConfig) -> Params:
    """Return weights of `moe_every` layers: dense blocks, then one with experts.

    Shapes:
      router [D, E]; up [E, D, F]; down [E, F, D].
    """
    d_model, d_ff, num = config.d_model, config.d_ff, config.num_experts
    dense = gpt.block_weights(d_model, config.num_heads, d_ff)
    sparse = {name: part for name, part in dense.items() if name != "mlp"}
    sparse["experts"] = {
        "router": weights.normal(d_model, num),
        "up": weights.normal(num, d_model, d_ff, fan_in=d_model),
        "down": weights.normal(num, d_ff, d_model, fan_in=d_ff),
    }
    return {"dense": (dense,) * (config.moe_every - 1), "sparse": sparse}


def group(
    config: MoEConfig,
    params: Params,
    carry: tuple[jax.Array, jax.Array],
    mask: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Apply one group; the carry is (x [B, S, D], sum of balancing losses)."""
    x, balance_sum = carry
    for dense in params["dense"]:
        x = gpt.block(dense, x, mask, config.attention)
    sparse = params["sparse"]
    p = nn.cast({k: v for k, v in sparse.items() if k != "experts"}, x.dtype)
    normed = nn.layer_norm(p["ln_attention"], x)
    x = x + gpt.self_attention(p["attention"], normed, mask, config.attention)
    routed, balance = experts(config, sparse["experts"], nn.layer_norm(p["ln_mlp"], x))
    return x + routed, balance_sum + balance


def describe(config: MoEConfig) -> Params:
    """Return the weights of the parameters."""
    d_model, num_groups = config.d_model, config.num_layers // config.moe_every
    return {
        "embed": Weight((config.vocab, d_model), std=0.02),
        "position": Weight((config.seq_len, d_model), std=0.02),
        "groups": weights.stack(group_weights(config), num_groups, config.layers),
        "ln_final": weights.norm(d_model),
    }


def loss(config: MoEConfig, params: Params, batch: Params) -> jax.Array:
    """Return the mean next-token cross entropy plus the weighted balancing loss."""
    mask = nn.causal_mask(config.seq_len)
    x = (params["embed"][batch["tokens"]] + params["position"]).astype(config.dtype)
    x, balance_sum = nn.run_stack(
        config,
        lambda p, carry: group(config, p, carry, mask),
        params["groups"],
        (x, jnp.zeros((), jnp.float32)),
    )
    x = nn.layer_norm(nn.cast(params["ln_final"], x.dtype), x)
    logits = jnp.einsum("bsd,vd->bsv", x, params["embed"].astype(x.dtype))
    balance = balance_sum * config.moe_every / config.num_layers
    return nn.cross_entropy(logits, batch["labels"]) + config.aux_weight * balance


make_batch = nn.token_batch
