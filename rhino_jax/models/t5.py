"""T5: encoder-decoder with cross attention and relative position biases.

No biases on matmuls, RMSNorm, ReLU, scores not scaled, tied embedding.

Source: Raffel et al. 2020, section 2.1 and the released mesh-tensorflow models.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from rhino_jax.models import layers as nn, weights
from rhino_jax.models.config import StackConfig
from rhino_jax.models.layers import Params
from rhino_jax.models.weights import Weight


@dataclass(frozen=True, kw_only=True)
class T5Config(StackConfig):
    """Sizes: V vocab, S source_len, T target_len, D d_model, H heads, K d_head, F d_ff.

    Attributes:
      num_layers: number of layers of the encoder, and of the decoder.
      position_bias: whether scores have a learned bias by relative position.
      position_buckets: number of buckets of relative positions.
      position_max_distance: distance from which on all share the last bucket.
    """

    vocab: int
    source_len: int
    target_len: int
    num_layers: int
    d_model: int
    num_heads: int
    d_head: int
    d_ff: int
    position_bias: bool = True
    position_buckets: int = 32
    position_max_distance: int = 128

    def conflicts(self) -> Iterator[tuple[str, str]]:
        yield from super().conflicts()
        if self.position_buckets < 4:
            yield "position_buckets", "a whole number >= 4: near and far, either way"
        nearest = self.position_buckets // 2
        if self.position_max_distance <= nearest:
            yield "position_max_distance", f"more than position_buckets / 2 = {nearest}"


def position_bucket(
    distance: jax.Array, *, two_way: bool, buckets: int, max_distance: int
) -> jax.Array:
    """Return the bucket of a relative position: exact when near, logarithmic when far.

    Args:
      distance: key position minus query position.
      two_way: whether keys after the query have separate buckets (the encoder).
      buckets: number of buckets.
      max_distance: distances from here on share the last bucket.
    """
    bucket = jnp.zeros_like(distance)
    if two_way:
        buckets //= 2
        bucket = jnp.where(distance > 0, buckets, 0)
        away = jnp.abs(distance)
    else:
        away = jnp.maximum(-distance, 0)
    exact = buckets // 2
    far = jnp.log(jnp.maximum(away, 1) / exact) / math.log(max_distance / exact)
    far = exact + (far * (buckets - exact)).astype(jnp.int32)
    return bucket + jnp.where(away < exact, away, jnp.minimum(far, buckets - 1))


def position_bias(
    config: T5Config, table: jax.Array, seq_len: int, *, two_way: bool
) -> jax.Array:
    """Return the bias of the scores, [H, S, S], from a table [buckets, H]."""
    positions = jnp.arange(seq_len)
    bucket = position_bucket(
        positions[None, :] - positions[:, None],
        two_way=two_way,
        buckets=config.position_buckets,
        max_distance=config.position_max_distance,
    )
    return jnp.einsum("qsh->hqs", table[bucket])


def attention_weights(config: T5Config) -> Params:
    """Return the weights q, k, v [D, H, K] each, and out [H, K, D]."""
    d_model, heads, d_head = config.d_model, config.num_heads, config.d_head
    return {
        "norm": weights.ones(d_model),
        # The scores are not scaled, so q contains the factor 1 / sqrt(K).
        "q": weights.normal(d_model, heads, d_head, fan_in=d_model * d_head),
        "k": weights.normal(d_model, heads, d_head, fan_in=d_model),
        "v": weights.normal(d_model, heads, d_head, fan_in=d_model),
        "out": weights.normal(heads, d_head, d_model),
    }


def mlp_weights(config: T5Config) -> Params:
    """Return the weights up [D, F] and down [F, D]."""
    d_model, d_ff = config.d_model, config.d_ff
    return {
        "norm": weights.ones(d_model),
        "up": weights.normal(d_model, d_ff),
        "down": weights.normal(d_ff, d_model),
    }


def attend(
    params: Params,
    x: jax.Array,
    memory: jax.Array | None = None,
    *,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
) -> jax.Array:
    """Apply residual attention of x [B, Q, D] to itself, or to a memory [B, S, D]."""
    normed = nn.rms_norm(params["norm"], x)
    source = normed if memory is None else memory
    q = jnp.einsum("bqd,dhk->bqhk", normed, params["q"])
    k = jnp.einsum("bsd,dhk->bshk", source, params["k"])
    v = jnp.einsum("bsd,dhk->bshk", source, params["v"])
    mixed = nn.attention(q, k, v, scale=1.0, mask=mask, bias=bias)
    return x + jnp.einsum("bqhk,hkd->bqd", mixed, params["out"])


def mlp(params: Params, x: jax.Array) -> jax.Array:
    """Apply a residual two-layer perceptron with ReLU: x [B, S, D] to [B, S, D]."""
    normed = nn.rms_norm(params["norm"], x)
    hidden = jax.nn.relu(jnp.einsum("bsd,df->bsf", normed, params["up"]))
    return x + jnp.einsum("bsf,fd->bsd", hidden, params["down"])


def describe(config: T5Config) -> Params:
    """Return the weights of the parameters."""
    d_model, num_layers, form = config.d_model, config.num_layers, config.layers
    block = {"attention": attention_weights(config), "mlp": mlp_weights(config)}
    cross = {"cross": attention_weights(config)}
    params = {
        "embed": weights.normal(config.vocab, d_model, fan_in=d_model),
        "encoder": weights.stack(block, num_layers, form),
        "encoder_norm": weights.ones(d_model),
        "decoder": weights.stack({**block, **cross}, num_layers, form),
        "decoder_norm": weights.ones(d_model),
    }
    if config.position_bias:
        table = Weight((config.position_buckets, config.num_heads), std=0.1)
        params["position_bias"] = {"encoder": table, "decoder": table}
    return params


def encode(config: T5Config, params: Params, source: jax.Array) -> jax.Array:
    """Return the encoder's output: source tokens [B, S] to [B, S, D]."""
    bias = None
    if config.position_bias:
        table = params["position_bias"]["encoder"]
        bias = position_bias(config, table, source.shape[1], two_way=True)

    def block(params: Params, x: jax.Array) -> jax.Array:
        p = nn.cast(params, x.dtype)
        return mlp(p["mlp"], attend(p["attention"], x, bias=bias))

    x = params["embed"][source].astype(config.dtype)
    x = nn.run_stack(
        config,
        block,
        params["encoder"],
        x,
    )
    return nn.rms_norm(params["encoder_norm"].astype(x.dtype), x)


def decode(
    config: T5Config, params: Params, memory: jax.Array, target: jax.Array
) -> jax.Array:
    """Return next-token scores: memory [B, S, D], target tokens [B, T] to [B, T, V]."""
    bias = None
    if config.position_bias:
        table = params["position_bias"]["decoder"]
        bias = position_bias(config, table, target.shape[1], two_way=False)
    mask = nn.causal_mask(target.shape[1])

    def block(params: Params, x: jax.Array) -> jax.Array:
        p = nn.cast(params, x.dtype)
        x = attend(p["attention"], x, bias=bias, mask=mask)
        return mlp(p["mlp"], attend(p["cross"], x, memory))

    x = params["embed"][target].astype(config.dtype)
    x = nn.run_stack(
        config,
        block,
        params["decoder"],
        x,
    )
    x = nn.rms_norm(params["decoder_norm"].astype(x.dtype), x)
    # The tied embedding has rows of norm 1; T5 scales the output by 1 / sqrt(D).
    x = x * config.d_model**-0.5
    return jnp.einsum("btd,vd->btv", x, params["embed"].astype(x.dtype))


def loss(config: T5Config, params: Params, batch: Params) -> jax.Array:
    """Return the mean next-token cross entropy of the target."""
    memory = encode(config, params, batch["source"])
    logits = decode(config, params, memory, batch["tokens"])
    return nn.cross_entropy(logits, batch["labels"])


def make_batch(config: T5Config, key: jax.Array) -> Params:
    """Return random source [B, S], target tokens and labels [B, T]."""
    source, target = jax.random.split(key)
    shape = (config.batch, config.source_len)
    return {
        "source": jax.random.randint(source, shape, 0, config.vocab),
        **nn.token_batch(config, target, config.target_len),
    }
