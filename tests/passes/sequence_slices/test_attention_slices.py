"""Attention as it is written: the same numbers in slices."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from helpers_slices import (
    EYE,
    TRIL,
    D,
    H,
    S,
    attention_step,
    biased,
    check,
    is_token,
    masked,
    mixed,
    scores_of,
)

from rhino_jax.passes.sequence_slices.sliced import sequence_length
from tests.cases import covering
from tests.passes.zoo import compiled


def _added(batch):
    return jnp.where(TRIL, 0.0, -1e9)


def _multiplied(batch):
    return (1 - TRIL.astype(jnp.float32)) * -1e9


def _alibi(batch):
    place = jnp.arange(S)
    return jnp.where(TRIL, (place - place[:, None]) * 0.5, -jnp.inf)


def _alibi_first(q, k, v, batch):
    place = jnp.arange(S)
    scores = scores_of(q, k) + (place - place[:, None]) * 0.5
    return mixed(jax.nn.softmax(jnp.where(TRIL, scores, -1e9)), v)


def _by_places(batch):
    place = jnp.arange(S)
    return place[:, None] >= place


def _padded(batch):
    return TRIL & (is_token(batch) | EYE)


def _padded_first(q, k, v, batch):
    scores = jnp.where(is_token(batch) | EYE, scores_of(q, k), -1e9)
    return mixed(jax.nn.softmax(jnp.where(TRIL, scores, -1e9)), v)


def _padding_added_first(q, k, v, batch):
    scores = scores_of(q, k) + jnp.where(is_token(batch) | EYE, 0.0, -1e9)
    return mixed(jax.nn.softmax(scores + jnp.where(TRIL, 0.0, -1e9)), v)


def _wide(q, k, v, batch):
    """Means over many elements divide by more than weights are."""
    q = q * jax.lax.rsqrt((q * q).sum(-1, keepdims=True) / 4096 + 1) * 2048
    scores = jnp.minimum(scores_of(q, k) / 2048, 1e4)
    return mixed(jax.nn.softmax(scores + jnp.where(TRIL, 0.0, -1e9)), v)


def _window(batch):
    place = jnp.arange(S)
    return TRIL & (place[:, None] - place < 3)


def _first_seen(batch):
    """The first token is never masked, others see neither themselves nor padding."""
    return (TRIL & ~EYE & is_token(batch)) | (jnp.arange(S) == 0)


def _two_windows(q, k, v, batch):
    place = jnp.arange(S)
    near, nearer = (TRIL & (place[:, None] - place < n) for n in (4, 3))
    scores = jnp.where(near, scores_of(q, k), -1e9)
    return mixed(jax.nn.softmax(scores + jnp.where(nearer, 0.0, -1e9)), v)


def _product_of_masks(batch):
    seen = (is_token(batch) | EYE).astype(jnp.float32)
    return (TRIL.astype(jnp.float32) * seen).astype(bool)


def _segments(batch):
    tokens = batch["tokens"]
    return TRIL & ((tokens[:, None, :, None] == tokens[:, None, None, :]) | EYE)


def _scores_and_their_transpose(q, k, v, batch):
    scores = scores_of(q, k) + scores_of(q, k).swapaxes(-1, -2)
    return mixed(jnp.where(TRIL, scores, 0), v)


def _own_softmax(q, k, v, batch):
    """Its maximum has a gradient."""
    scores = jnp.where(TRIL, scores_of(q, k), -1e9)
    e = jnp.exp(scores - scores.max(-1, keepdims=True))
    return mixed(e / e.sum(-1, keepdims=True), v)


def _without_maximum(q, k, v, batch):
    e = jnp.exp(scores_of(q, k)) * TRIL
    return mixed(e / e.sum(-1, keepdims=True), v)


def _where_of_softmax(q, k, v, batch):
    return mixed(jax.nn.softmax(scores_of(q, k), where=TRIL), v)


def _is_causal(q, k, v, batch):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def _with_bias(q, k, v, batch):
    bias = jnp.where(TRIL, 0, -1e9)[None, None]
    return jax.nn.dot_product_attention(q, k, v, bias=bias)


def _grouped_queries(q, k, v, batch):
    return _is_causal(q, k[:, :, :1], v[:, :, :1], batch)


def _mapped(q, k, v, batch):
    def one(q, k, v):
        return jax.nn.softmax(jnp.where(TRIL, q @ k.T, -jnp.inf)) @ v

    return jax.vmap(jax.vmap(one, (1, 1, 1), 1))(q, k, v)


def _dropout(q, k, v, batch):
    weights = jax.nn.softmax(jnp.where(TRIL, scores_of(q, k), -1e9))
    keep = jax.random.bernoulli(jax.random.key(3), 0.8, weights.shape)
    return mixed(jnp.where(keep, weights / 0.8, 0), v)


def _capped(q, k, v, batch):
    scores = 5 * jnp.tanh(scores_of(q, k) / 5)
    return mixed(jax.nn.softmax(jnp.where(TRIL, scores, -1e9)), v)


def _sigmoid(q, k, v, batch):
    return mixed(jax.nn.sigmoid(scores_of(q, k)) * TRIL, v)


def _linear(q, k, v, batch):
    return mixed(scores_of(q, k) * TRIL, v)


def _keys_first(q, k, v, batch):
    scores = jnp.einsum("bqhk,bshk->bhsq", q, k)
    scores = jnp.where(TRIL.T, scores, -1e9)
    return jnp.einsum("bhsq,bshk->bqhk", jax.nn.softmax(scores, axis=-2), v)


def _heads_in_the_batch(q, k, v, batch):
    q, k, v = (x.transpose(0, 2, 1, 3).reshape(-1, S, D // H) for x in (q, k, v))
    scores = jnp.where(TRIL, q @ k.transpose(0, 2, 1), -1e9)
    made = jax.nn.softmax(scores) @ v
    return made.reshape(-1, H, S, D // H).transpose(0, 2, 1, 3)


def _tokens_in_the_batch(q, k, v, batch):
    flat = q.reshape(-1, q.shape[-1])
    return _is_causal(jnp.sin(flat).reshape(q.shape), k, v, batch)


ATTENTION = {
    "a captured mask": masked(TRIL),
    "padding": masked(_padded),
    "minus infinity": masked(TRIL, -jnp.inf),
    "-1e4": masked(TRIL, -1e4),
    "the least float": masked(TRIL, jnp.finfo(jnp.float32).min),
    "by places": masked(_by_places),
    "a window": masked(_window),
    "an added mask": biased(_added),
    "a multiplied mask": biased(_multiplied),
    "distances": biased(_alibi),
    "the first seen": masked(_first_seen),
    "a product of masks": masked(_product_of_masks),
    "segments": masked(_segments),
    **{
        f.__name__[1:]: f
        for f in (
            _is_causal, _alibi_first, _padded_first, _padding_added_first, _own_softmax,
            _without_maximum,
            _where_of_softmax, _with_bias, _grouped_queries, _mapped, _dropout,
            _capped, _sigmoid, _linear, _keys_first, _heads_in_the_batch,
            _tokens_in_the_batch, _wide, _two_windows, _scores_and_their_transpose,
        )
    },
}  # fmt: skip

ALIKE = {
    "minus infinity", "-1e4", "an added mask", "a multiplied mask", "alibi_first",
    "padded_first", "with_bias", "capped", "sigmoid", "linear", "a product of masks",
}  # fmt: skip
"""Attention whose parts are in others, too."""


@pytest.mark.parametrize("name", covering(ATTENTION, lambda name: name not in ALIKE))
def test_attention_is_the_same_in_slices(name):
    apart, arrays = attention_step(ATTENTION[name])
    assert sequence_length(apart) == S
    check(apart, arrays, (5, 4, 3))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["padding", "is_causal", "dropout"])
def test_compiled_attention_is_the_same_in_slices(name):
    check(*attention_step(ATTENTION[name]), (5, 4, 3), compiled)
