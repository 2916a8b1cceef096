"""Steps whose tokens need later ones are refused, at the line that does it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from helpers_slices import (
    EYE,
    TRIL,
    S,
    attention_step,
    biased,
    is_token,
    masked,
    mixed,
    scores_of,
)

from rhino_jax.errors import TokenSliceError
from rhino_jax.passes.sequence_slices.sliced import sliced


UNSEEN = "may find all columns of a row masked"


def refused(attend) -> str:
    """What is said of it: in four parts, of which one names the line."""
    apart, _ = attention_step(attend)
    with pytest.raises(TokenSliceError) as error:
        sliced(apart, (S // 2, S // 2))
    found = error.value
    assert all((found.what, found.where, found.numbers, found.fix))
    assert "_slices.py:" in found.where
    return found.what


MASKS = {
    "none": (jnp.ones((S, S), bool), "token 0 may see token 1"),
    "later tokens alone": (TRIL.T, "lets tokens read later ones"),
    "off by one": (jnp.tril(jnp.ones((S, S), bool), k=1), "token 0 may see token 1"),
    "one leak": (TRIL.at[-3, -2].set(True), "token 9 may see token 10"),
    "a prefix": (TRIL | (jnp.arange(S) < 4), "token 0 may see token 1"),
    "the first sees nothing": (TRIL & ~EYE, UNSEEN),
    "blocks": (jnp.kron(jnp.eye(3), jnp.ones((4, 4))) > 0, "0 may see"),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_that_are_not_causal(name):
    mask, why = MASKS[name]
    assert why in refused(masked(mask))


def test_attention_without_a_mask():
    def attend(q, k, v, batch):
        return mixed(jax.nn.softmax(scores_of(q, k)), v)

    assert "lets tokens read later ones" in refused(attend)


def test_a_mask_that_is_made_of_data():
    def prefix(batch):
        return TRIL | (batch["tokens"] < 3)[:, None, None, :]

    assert "lets tokens read later ones" in refused(masked(prefix))


def test_positions_that_are_rounded():
    """In bfloat16, 257 is 256: every second token sees the one after it."""

    def seen(batch):
        at = (jnp.arange(S) + 256).astype(jnp.bfloat16)
        return at[:, None] >= at

    assert "token 0 may see token 1" in refused(masked(seen))


def test_scores_that_are_added_to_their_transpose():
    def attend(q, k, v, batch):
        scores = jnp.where(TRIL, scores_of(q, k), -1e9)
        weights = jax.nn.softmax(scores)
        return mixed(weights + weights.swapaxes(-1, -2), v)

    assert "turns rows and columns of pairs" in refused(attend)


@pytest.mark.parametrize("low", [0.0, -50.0])
def test_masked_scores_that_still_count(low):
    refused(masked(TRIL, low))


@pytest.mark.parametrize("axis", [-2, 1])
def test_a_softmax_over_another_axis(axis):
    refused(masked(TRIL, axis=axis))


def _and(batch):
    return TRIL & is_token(batch)


def _added(batch):
    return jnp.where(TRIL, 0.0, -1e9) + jnp.where(is_token(batch), 0.0, -1e9)


def _one_by_one(q, k, v, batch):
    scores = jnp.where(is_token(batch), scores_of(q, k), -1e9)
    return mixed(jax.nn.softmax(jnp.where(TRIL, scores, -1e9)), v)


def _multiplied(batch):
    padding = 1e9 * (batch["tokens"] == 0).astype(jnp.float32)
    return jnp.where(TRIL, 0.0, -1e9) - padding[:, None, None, :]


@pytest.mark.parametrize(
    "attend", [masked(_and), biased(_added), _one_by_one, biased(_multiplied)]
)
def test_rows_that_padding_may_mask_in_full(attend):
    """Their softmax is over all columns alike, later ones too."""
    assert UNSEEN in refused(attend)


def test_scores_that_are_set_to_zero_before_their_softmax():
    def attend(q, k, v, batch):
        return mixed(jax.nn.softmax(scores_of(q, k) * TRIL), v)

    refused(attend)


def test_what_is_subtracted_may_be_as_low_as_masked_scores():
    """Their difference is then zero, and its exponential one."""

    def attend(q, k, v, batch):
        scores = jnp.where(TRIL, scores_of(q, k), -1e9)
        rows = jnp.where(batch["tokens"] != 0, q.sum((2, 3)), -1e9)
        return mixed(jnp.exp(scores - rows[:, None, :, None]), v)

    assert "lets tokens read later ones" in refused(attend)


AHEAD = jnp.tril(jnp.ones((S, S), bool), k=1)


@pytest.mark.parametrize(
    "weigh",
    [
        lambda low, other: other <= low,
        lambda low, other: low == other,
        lambda low, other: jnp.exp(low - other) / 100,
        lambda low, other: jnp.exp(low + -other) / 100,
    ],
)
def test_scores_that_are_both_masked_in_some_later_column(weigh):
    """Both are then equally low: a mask that looks ahead decides what is seen."""

    def attend(q, k, v, batch):
        low = jnp.where(TRIL, scores_of(q, k), -1e9)
        other = jnp.where(AHEAD, scores_of(k, q), -1e9)
        return mixed(weigh(low, other).astype(q.dtype), v)

    assert "lets tokens read later ones" in refused(attend)


def test_padding_that_is_subtracted_may_mask_rows_in_full():
    def attend(q, k, v, batch):
        scores = jnp.where(TRIL, scores_of(q, k), -1e9)
        return mixed(jax.nn.softmax(scores - jnp.where(is_token(batch), 0, 1e9)), v)

    assert UNSEEN in refused(attend)


OPS = {
    "a running sum": lambda v: 2 * jnp.cumsum(v, axis=1),
    "the mean": lambda v: v + v.mean(1, keepdims=True),
    "turned": lambda v: 2 * v[:, ::-1],
    "the next token": lambda v: 2 * jnp.roll(v, -1, axis=1),
    "sorted": lambda v: 2 * jnp.sort(v, axis=1),
    "a softmax over tokens": lambda v: jax.nn.softmax(v, axis=1),
    "all tokens mixed": lambda v: 2 * jnp.einsum("bshk,st->bthk", v, jnp.eye(S)),
    "a spectrum": lambda v: 2 * jnp.fft.fft(v, axis=1).real,
}


@pytest.mark.parametrize("name", OPS)
def test_what_else_mixes_tokens(name):
    refused(lambda q, k, v, batch: OPS[name](v))
