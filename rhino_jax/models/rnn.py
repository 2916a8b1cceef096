"""A recurrent language model: GRU or LSTM layers, each a `scan` over time.

The gates are a separate dim: weights [D, gates, H], activations [B, gates, H].

Source: Cho et al. 2014 (GRU); Hochreiter and Schmidhuber 1997 (LSTM).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from rhino_jax.models import layers as nn, weights
from rhino_jax.models.config import TrainConfig
from rhino_jax.models.layers import Params
from rhino_jax.models.weights import Weight


@dataclass(frozen=True, kw_only=True)
class RNNConfig(TrainConfig):
    """Sizes: V vocab, T seq_len, H d_hidden."""

    vocab: int
    seq_len: int
    num_layers: int
    d_hidden: int
    cell: Literal["gru", "lstm"] = "gru"

    @property
    def num_gates(self) -> int:
        return 3 if self.cell == "gru" else 4


def gru(params: Params, h: jax.Array, inputs: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Compute a step: h [B, H], projected inputs [B, 3, H] to (state, output)."""
    recurrent = jnp.einsum("bh,hgk->bgk", h, params["hidden"]) + params["hidden_bias"]
    reset = jax.nn.sigmoid(inputs[:, 0] + recurrent[:, 0])
    update = jax.nn.sigmoid(inputs[:, 1] + recurrent[:, 1])
    candidate = jnp.tanh(inputs[:, 2] + reset * recurrent[:, 2])
    h = (1 - update) * candidate + update * h
    return h, h


def lstm(
    params: Params, state: tuple[jax.Array, jax.Array], inputs: jax.Array
) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
    """Compute a step: (h, c) [B, H], projected inputs [B, 4, H] to (state, output)."""
    h, c = state
    recurrent = jnp.einsum("bh,hgk->bgk", h, params["hidden"]) + params["hidden_bias"]
    gates = inputs + recurrent
    keep, write, show = (jax.nn.sigmoid(gates[:, i]) for i in range(3))
    c = keep * c + write * jnp.tanh(gates[:, 3])
    h = show * jnp.tanh(c)
    return (h, c), h


def run_layer(config: RNNConfig, params: Params, x: jax.Array) -> jax.Array:
    """Apply one layer to a whole sequence: x [T, B, H] to [T, B, H]."""
    p = nn.cast(params, x.dtype)
    inputs = jnp.einsum("tbd,dgk->tbgk", x, p["input"]) + p["input_bias"]
    zeros = jnp.zeros(x.shape[1:], x.dtype)
    state: Any = zeros if config.cell == "gru" else (zeros, zeros)
    step: Any = gru if config.cell == "gru" else lstm
    return jax.lax.scan(lambda s, i: step(p, s, i), state, inputs)[1]


def describe(config: RNNConfig) -> Params:
    """Return the weights of the parameters."""
    width, gates, vocab = config.d_hidden, config.num_gates, config.vocab
    layer = {
        "input": weights.normal(width, gates, width, fan_in=width),
        "input_bias": weights.zeros(gates, width),
        "hidden": weights.normal(width, gates, width, fan_in=width),
        "hidden_bias": weights.zeros(gates, width),
    }
    return {
        "embed": Weight((vocab, width), std=1.0),
        "layers": (layer,) * config.num_layers,
        "head": weights.normal(width, vocab),
        "head_bias": weights.zeros(vocab),
    }


def loss(config: RNNConfig, params: Params, batch: Params) -> jax.Array:
    """Return the mean next-token cross entropy."""
    x = params["embed"][batch["tokens"].T].astype(config.dtype)
    for layer in params["layers"]:
        x = run_layer(config, layer, x)
    logits = jnp.einsum("tbh,hv->tbv", x, params["head"].astype(x.dtype))
    logits = logits.astype(jnp.float32) + params["head_bias"]
    return optax.softmax_cross_entropy_with_integer_labels(
        logits, batch["labels"].T
    ).mean()


make_batch = nn.token_batch
