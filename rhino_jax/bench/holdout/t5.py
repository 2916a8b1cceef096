"""An encoder-decoder with relative position biases and gated hidden layers.

There are no other biases; embeddings are shared with the logits.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from rhino_jax.bench.holdout import parts
from rhino_jax.bench.holdout.parts import Keys, Params
from rhino_jax.models.workload import Workload


def workload(
    batch: int = 64,
    source_len: int = 256,
    target_len: int = 128,
    width: int = 768,
    num_layers: int = 2,
    num_heads: int = 12,
    vocab: int = 32_128,
) -> Workload:
    """Return the workload: source [batch, source_len] to target [batch, target_len]."""

    def init(keys: Keys) -> Params:
        return {
            "tokens": parts.normal(keys, vocab, width, fan_in=width),
            "encoder_bias": parts.normal(keys, 32, num_heads),
            "decoder_bias": parts.normal(keys, 32, num_heads),
            "encoder": [
                _layer_init(keys, width, crosses=False) for _ in range(num_layers)
            ],
            "decoder": [
                _layer_init(keys, width, crosses=True) for _ in range(num_layers)
            ],
            "encoder_ln": parts.norm_init(width),
            "decoder_ln": parts.norm_init(width),
        }

    def loss_fn(params: Params, batch: Params) -> jax.Array:
        context = _encoded(params, batch["source"], num_heads)
        x = _decoded(params, context, batch["target"], num_heads)
        logits = x @ params["tokens"].T.astype(x.dtype)
        return parts.cross_entropy(logits, batch["target"])

    def make_batch(key: jax.Array) -> Params:
        first, second = jax.random.split(key)
        return {
            "source": parts.tokens(first, vocab, batch, source_len),
            "target": parts.tokens(second, vocab, batch, target_len),
        }

    return parts.training("unseen-t5", batch, init, loss_fn, make_batch)


def _layer_init(keys: Keys, width: int, *, crosses: bool) -> Params:
    layer = {
        "ln1": parts.norm_init(width),
        "self": parts.attention_init(keys, width),
        "ln2": parts.norm_init(width),
        "mlp": {
            "gate": parts.normal(keys, width, 2048),
            "up": parts.normal(keys, width, 2048),
            "down": parts.normal(keys, 2048, width),
        },
    }
    if crosses:
        layer["ln3"] = parts.norm_init(width)
        layer["cross"] = parts.attention_init(keys, width)
    return layer


def _encoded(params: Params, source: jax.Array, num_heads: int) -> jax.Array:
    """Encode tokens [B, S] → [B, S, D]."""
    bias = _position_bias(params["encoder_bias"], source.shape[1])
    x = params["tokens"][source].astype(jnp.bfloat16)
    for p in params["encoder"]:
        y = parts.layer_norm(p["ln1"], x)
        x = x + parts.attention(p["self"], y, y, num_heads, bias=bias)
        x = x + _gated(p["mlp"], parts.layer_norm(p["ln2"], x))
    return parts.layer_norm(params["encoder_ln"], x)


def _decoded(
    params: Params, context: jax.Array, target: jax.Array, num_heads: int
) -> jax.Array:
    """Decode tokens [B, T], each of which attends to those before it, → [B, T, D]."""
    length = target.shape[1]
    bias = _position_bias(params["decoder_bias"], length)
    causal = jnp.tril(jnp.ones((length, length), dtype=bool))
    shifted = jnp.pad(target, ((0, 0), (1, 0)))[:, :-1]
    x = params["tokens"][shifted].astype(jnp.bfloat16)
    for p in params["decoder"]:
        y = parts.layer_norm(p["ln1"], x)
        x = x + parts.attention(p["self"], y, y, num_heads, causal, bias)
        y = parts.layer_norm(p["ln3"], x)
        x = x + parts.attention(p["cross"], y, context, num_heads)
        x = x + _gated(p["mlp"], parts.layer_norm(p["ln2"], x))
    return parts.layer_norm(params["decoder_ln"], x)


def _position_bias(table: jax.Array, length: int) -> jax.Array:
    """Return position biases [heads, length, length]."""
    place = jnp.arange(length)
    distance = jnp.clip(place[None, :] - place[:, None] + 16, 0, 31)
    return jnp.moveaxis(table[distance], -1, 0)


def _gated(p: Params, x: jax.Array) -> jax.Array:
    gate = jax.nn.gelu(x @ p["gate"].astype(x.dtype))
    return (gate * (x @ p["up"].astype(x.dtype))) @ p["down"].astype(x.dtype)
