"""A decoder with tied embeddings, layers unrolled."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from rhino_jax.bench.holdout import parts
from rhino_jax.bench.holdout.parts import Keys, Params
from rhino_jax.models.workload import Workload


def workload(
    batch: int = 64,
    seq_len: int = 512,
    width: int = 1024,
    num_layers: int = 4,
    num_heads: int = 16,
    vocab: int = 32_000,
) -> Workload:
    """Return the workload: next-token training of tokens [batch, seq_len]."""

    def init(keys: Keys) -> Params:
        return {
            "tokens": parts.normal(keys, vocab, width, fan_in=width),
            "positions": parts.normal(keys, seq_len, width, fan_in=width),
            "layers": [parts.layer_init(keys, width) for _ in range(num_layers)],
            "ln": parts.norm_init(width),
        }

    def loss_fn(params: Params, batch: Params) -> jax.Array:
        x = params["tokens"][batch["inputs"]] + params["positions"]
        x = x.astype(jnp.bfloat16)
        causal = jnp.tril(jnp.ones((seq_len, seq_len), dtype=bool))
        for p in params["layers"]:
            x = parts.layer(p, x, num_heads, causal)
        x = parts.layer_norm(params["ln"], x)
        logits = x @ params["tokens"].T.astype(x.dtype)
        return parts.cross_entropy(logits, batch["targets"])

    def make_batch(key: jax.Array) -> Params:
        first, second = jax.random.split(key)
        return {
            "inputs": parts.tokens(first, vocab, batch, seq_len),
            "targets": parts.tokens(second, vocab, batch, seq_len),
        }

    return parts.training("unseen-gpt", batch, init, loss_fn, make_batch)
