"""Models as they are written, heads and losses too: the same numbers in slices."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers_slices import (
    TRIL,
    B,
    D,
    H,
    S,
    V,
    apart_of,
    attending,
    attention_weights,
    check,
    check_order,
    of_zoo,
    tokens,
    training,
)

from rhino_jax.passes.sequence_slices.sliced import sequence_length, sliced
from tests.cases import covering
from tests.passes.zoo import compiled


def _is_causal(q, k, v, batch):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def picked(logits, labels):
    of_labels = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1)
    return -of_labels[..., 0]


class Decoder(nn.Module):
    pooled: str = ""
    dropout: float = 0.0

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(V, D)(tokens) + nn.Embed(S, D)(jnp.arange(tokens.shape[1]))
        attend = nn.MultiHeadDotProductAttention(
            num_heads=H, dropout_rate=self.dropout, deterministic=not self.dropout
        )
        x = x + attend(nn.LayerNorm()(x), mask=nn.make_causal_mask(tokens))
        x = x + nn.Dense(D)(nn.gelu(nn.Dense(2 * D)(nn.LayerNorm()(x))))
        if self.pooled:
            x = x.mean(1) if self.pooled == "mean" else x[:, -1]
        return nn.Dense(V)(x)


def linen(**options):
    model = Decoder(**options)
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda x: rng.normal(size=x.shape).astype(x.dtype) / 2,
        jax.eval_shape(model.init, jax.random.key(0), tokens()),
    )

    def loss(params, batch):
        keys = {"dropout": jax.random.key(1)}
        labels = batch["labels"][:, 0] if model.pooled else batch["labels"]
        return picked(model.apply(params, batch["tokens"], rngs=keys), labels).mean()

    batch = {"tokens": tokens(), "labels": tokens(2)}
    return apart_of(training(loss), (params, batch))


def text():
    """All but the last token are read, all but the first predicted."""
    inner = attending(_is_causal)

    def loss(params, batch):
        text = batch["text"]
        return inner(params, {"tokens": text[:, :-1], "labels": text[:, 1:]})

    args = attention_weights(), {"text": tokens(1, S + 1)}
    return apart_of(training(loss), args)


def shifted():
    """All tokens are read, and the last has no label; padding does not count."""

    def loss(params, batch):
        x = params["embed"][batch["tokens"]]
        q, k, v = (jnp.einsum("bsd,dhk->bshk", x, w) for w in params["qkv"])
        x = jnp.einsum("bshk,hkd->bsd", _is_causal(q, k, v, batch), params["out"])
        labels = batch["tokens"][:, 1:]
        losses = picked((x @ params["embed"].T)[:, :-1], labels)
        return (losses * (labels != 0)).sum()

    args = attention_weights(), {"tokens": tokens()}
    return apart_of(training(loss), args)


def mapped():
    """Written for one row of the batch, and one head."""

    def one(params, tokens, labels):
        x = params["embed"][tokens]

        def head(q, k, v, out):
            scores = jnp.where(TRIL, (x @ q) @ (x @ k).T, -jnp.inf)
            return jax.nn.softmax(scores) @ (x @ v) @ out

        x = x + jax.vmap(head, (1, 1, 1, 0))(*params["qkv"], params["out"]).sum(0)
        return picked(x @ params["embed"].T, labels).mean()

    def loss(params, batch):
        rows = jax.vmap(one, (None, 0, 0))
        return rows(params, batch["tokens"], batch["labels"]).mean()

    batch = {"tokens": tokens(), "labels": tokens(2)}
    return apart_of(training(loss), (attention_weights(), batch))


MODELS = {
    "linen": linen,
    "linen, mean of tokens": lambda: linen(pooled="mean"),
    "linen, last token": lambda: linen(pooled="last"),
    "linen, dropout": lambda: linen(dropout=0.1),
    "text": text,
    "shifted": shifted,
    "mapped": mapped,
}


@pytest.mark.parametrize(
    "name", covering(MODELS, lambda name: not name.startswith("linen,"))
)
def test_a_model_is_the_same_in_slices(name):
    apart, arrays = MODELS[name]()
    assert sequence_length(apart) == S
    check(apart, arrays, (6, 3, 3))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["linen", "linen, dropout"])
def test_a_compiled_model_is_the_same_in_slices(name):
    check(*MODELS[name](), (6, 3, 3), compiled)


ZOO = {
    "llama-tiny-unrolled": {},
    "llama-tiny": {},
    "gpt-tiny": {},
    "gpt-tiny, again": {"remat": True},
    "gpt-tiny, some again": {"remat": True, "remat_policy": "dots"},
    "gpt-tiny-unrolled, again": {"remat": True},
    "gpt-tiny-unrolled, some again": {"remat": True, "remat_policy": "dots"},
}
"""Models with their layers one by one or in a scan, kept or made again."""


@pytest.mark.parametrize("name", covering(ZOO, ["gpt-tiny, again"]))
def test_layers_are_the_same_in_slices(name):
    check(*of_zoo(name.partition(",")[0], **ZOO[name]), (16, 9, 7))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt-tiny", "gpt-tiny-unrolled"])
def test_layers_are_sliced_that_are_made_again(name):
    """Of keys and values the backward pass reads those that the forward pass made:
    what it makes again of earlier slices, it makes later."""
    apart, _ = of_zoo(name, remat=True)
    cut = sliced(apart, (20, 12))
    check_order(apart, cut, 2)


def test_a_row_may_be_as_long_as_the_batch():
    """Which of both is the sequence is told by where data have their batch."""
    batch = {"tokens": tokens(1, B), "labels": tokens(2, B)}
    args = attention_weights(), batch
    apart, _ = apart_of(training(attending(_is_causal)), args)
    assert sequence_length(apart) == B
