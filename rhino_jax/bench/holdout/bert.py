"""An encoder that predicts masked tokens; norms after the residual, as in BERT."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from rhino_jax.bench.holdout import parts
from rhino_jax.bench.holdout.parts import Keys, Params
from rhino_jax.models.workload import Workload


def workload(
    batch: int = 128,
    seq_len: int = 256,
    width: int = 768,
    num_layers: int = 4,
    num_heads: int = 12,
    vocab: int = 30_720,
    num_masked: int = 40,
) -> Workload:
    """Return the workload: masked-language training, `num_masked` labels a sequence."""

    def init(keys: Keys) -> Params:
        return {
            "tokens": parts.normal(keys, vocab, width, fan_in=width),
            "positions": parts.normal(keys, seq_len, width, fan_in=width),
            "segments": parts.normal(keys, 2, width, fan_in=width),
            "ln": parts.norm_init(width),
            "layers": [
                {
                    "attention": parts.attention_init(keys, width),
                    "ln1": parts.norm_init(width),
                    "mlp": parts.mlp_init(keys, width, 4 * width),
                    "ln2": parts.norm_init(width),
                }
                for _ in range(num_layers)
            ],
            "head": parts.dense_init(keys, width, width),
            "head_ln": parts.norm_init(width),
            "head_bias": jnp.zeros(vocab),
        }

    def loss_fn(params: Params, batch: Params) -> jax.Array:
        x = params["tokens"][batch["tokens"]] + params["positions"]
        x = x + params["segments"][batch["segments"]]
        x = parts.layer_norm(params["ln"], x).astype(jnp.bfloat16)
        for p in params["layers"]:
            y = parts.attention(p["attention"], x, x, num_heads)
            x = parts.layer_norm(p["ln1"], x + y)
            x = parts.layer_norm(p["ln2"], x + parts.mlp(p["mlp"], x))
        x = jnp.take_along_axis(x, batch["masked"][:, :, None], axis=1)
        x = parts.layer_norm(
            params["head_ln"], jax.nn.gelu(parts.dense(params["head"], x))
        )
        logits = x @ params["tokens"].T.astype(x.dtype) + params["head_bias"]
        return parts.cross_entropy(logits, batch["labels"])

    def make_batch(key: jax.Array) -> Params:
        a, b, c, d = jax.random.split(key, 4)
        return {
            "tokens": parts.tokens(a, vocab, batch, seq_len),
            "segments": parts.tokens(b, 2, batch, seq_len),
            "masked": parts.tokens(c, seq_len, batch, num_masked),
            "labels": parts.tokens(d, vocab, batch, num_masked),
        }

    return parts.training("unseen-bert", batch, init, loss_fn, make_batch)
