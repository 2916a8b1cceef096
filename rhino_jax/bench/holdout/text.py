"""Models of text: BERT, GPT and T5; and DLRM, a recommendation model."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import optax

from rhino_jax.bench.holdout import parts
from rhino_jax.bench.holdout.parts import Params
from rhino_jax.models import weights
from rhino_jax.models.workload import Workload


def bert(
    batch: int = 128,
    seq_len: int = 256,
    width: int = 768,
    num_layers: int = 4,
    num_heads: int = 12,
    vocab: int = 30_720,
    num_masked: int = 40,
) -> Workload:
    """Return the bert: masked-language training, `num_masked` labels a sequence."""

    described = {
        "tokens": weights.normal(vocab, width, fan_in=width),
        "positions": weights.normal(seq_len, width, fan_in=width),
        "segments": weights.normal(2, width, fan_in=width),
        "ln": weights.norm(width),
        "layers": [parts.layer_init(width)] * num_layers,
        "head": parts.dense_init(width, width),
        "head_ln": weights.norm(width),
        "head_bias": weights.zeros(vocab),
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

    draws = {
        "tokens": parts.tokens(vocab, batch, seq_len),
        "segments": parts.tokens(2, batch, seq_len),
        "masked": parts.tokens(seq_len, batch, num_masked),
        "labels": parts.tokens(vocab, batch, num_masked),
    }

    return parts.training("unseen-bert", batch, described, loss_fn, draws)


def gpt(
    batch: int = 64,
    seq_len: int = 512,
    width: int = 1024,
    num_layers: int = 4,
    num_heads: int = 16,
    vocab: int = 32_000,
) -> Workload:
    """Return the gpt: next-token training of tokens [batch, seq_len]."""

    described = {
        "tokens": weights.normal(vocab, width, fan_in=width),
        "positions": weights.normal(seq_len, width, fan_in=width),
        "layers": [parts.layer_init(width)] * num_layers,
        "ln": weights.norm(width),
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

    draws = {
        "inputs": parts.tokens(vocab, batch, seq_len),
        "targets": parts.tokens(vocab, batch, seq_len),
    }

    return parts.training("unseen-gpt", batch, described, loss_fn, draws)


def t5(
    batch: int = 64,
    source_len: int = 256,
    target_len: int = 128,
    width: int = 768,
    num_layers: int = 2,
    num_heads: int = 12,
    vocab: int = 32_128,
) -> Workload:
    """Return the t5: source [batch, source_len] to target [batch, target_len]."""

    described = {
        "tokens": weights.normal(vocab, width, fan_in=width),
        "encoder_bias": weights.normal(32, num_heads),
        "decoder_bias": weights.normal(32, num_heads),
        "encoder": [_layer_init(width, crosses=False)] * num_layers,
        "decoder": [_layer_init(width, crosses=True)] * num_layers,
        "encoder_ln": weights.norm(width),
        "decoder_ln": weights.norm(width),
    }

    def loss_fn(params: Params, batch: Params) -> jax.Array:
        context = _stack(params, "encoder", batch["source"], num_heads)
        x = _stack(params, "decoder", batch["target"], num_heads, context)
        logits = x @ params["tokens"].T.astype(x.dtype)
        return parts.cross_entropy(logits, batch["target"])

    draws = {
        "source": parts.tokens(vocab, batch, source_len),
        "target": parts.tokens(vocab, batch, target_len),
    }

    return parts.training("unseen-t5", batch, described, loss_fn, draws)


def _layer_init(width: int, *, crosses: bool) -> Params:
    layer = {
        "ln1": weights.norm(width),
        "self": parts.attention_init(width),
        "ln2": weights.norm(width),
        "mlp": {
            "gate": weights.normal(width, 2048),
            "up": weights.normal(width, 2048),
            "down": weights.normal(2048, width),
        },
    }
    if crosses:
        layer["ln3"] = weights.norm(width)
        layer["cross"] = parts.attention_init(width)
    return layer


def _stack(
    params: Params,
    side: str,
    tokens: jax.Array,
    num_heads: int,
    context: jax.Array | None = None,
) -> jax.Array:
    """Encode or decode tokens [B, S] → [B, S, D].

    Args:
      params: parameters of the model.
      side: "encoder" or "decoder".
      tokens: the tokens.
      num_heads: number of heads.
      context: the encoder's result, for the decoder, whose tokens attend to those
        before them; None for the encoder.
    """
    length = tokens.shape[1]
    bias, causal = _position_bias(params[f"{side}_bias"], length), None
    if context is not None:
        causal = jnp.tril(jnp.ones((length, length), dtype=bool))
        tokens = jnp.pad(tokens, ((0, 0), (1, 0)))[:, :-1]
    x = params["tokens"][tokens].astype(jnp.bfloat16)
    for p in params[side]:
        y = parts.layer_norm(p["ln1"], x)
        x = x + parts.attention(p["self"], y, y, num_heads, causal, bias)
        if context is not None:
            y = parts.layer_norm(p["ln3"], x)
            x = x + parts.attention(p["cross"], y, context, num_heads)
        x = x + _gated(p["mlp"], parts.layer_norm(p["ln2"], x))
    return parts.layer_norm(params[f"{side}_ln"], x)


def _position_bias(table: jax.Array, length: int) -> jax.Array:
    """Return position biases [heads, length, length]."""
    place = jnp.arange(length)
    distance = jnp.clip(place[None, :] - place[:, None] + 16, 0, 31)
    return jnp.moveaxis(table[distance], -1, 0)


def _gated(p: Params, x: jax.Array) -> jax.Array:
    gate = jax.nn.gelu(x @ p["gate"].astype(x.dtype))
    return (gate * (x @ p["up"].astype(x.dtype))) @ p["down"].astype(x.dtype)


def dlrm(
    batch: int = 32_768,
    num_tables: int = 8,
    rows: int = 100_000,
    width: int = 128,
    num_dense: int = 16,
) -> Workload:
    """Return the dlrm: click prediction from dense features and table lookups.

    Every example has one index into each table.
    """
    pairs = (num_tables + 1) * num_tables // 2
    bottom, top = (num_dense, 512, 256, width), (pairs + width, 1024, 1024, 512, 1)

    def stack(sizes: tuple[int, ...]) -> list[Params]:
        return [parts.dense_init(a, b) for a, b in itertools.pairwise(sizes)]

    described = {
        "tables": [weights.normal(rows, width, fan_in=width)] * num_tables,
        "bottom": stack(bottom),
        "top": stack(top),
    }

    def loss_fn(params: Params, batch: Params) -> jax.Array:
        x = batch["dense"]
        for p in params["bottom"]:
            x = jax.nn.relu(parts.dense(p, x))
        looked_up = [t[batch["ids"][:, i]] for i, t in enumerate(params["tables"])]
        every = jnp.stack([x, *looked_up], axis=1)
        products = jnp.einsum("bid,bjd->bij", every, every)
        rows, columns = jnp.tril_indices(num_tables + 1, -1)
        y = jnp.concatenate([x, products[:, rows, columns]], axis=1)
        for p in params["top"][:-1]:
            y = jax.nn.relu(parts.dense(p, y))
        logits = parts.dense(params["top"][-1], y)[:, 0]
        return optax.sigmoid_binary_cross_entropy(logits, batch["clicks"]).mean()

    draws = {
        "dense": parts.noise(batch, num_dense),
        "ids": parts.tokens(rows, batch, num_tables),
        "clicks": lambda key: jax.random.bernoulli(key, 0.1, (batch,)).astype(float),
    }

    return parts.training(
        "unseen-dlrm", batch, described, loss_fn, draws, optax.adagrad(1e-2)
    )
