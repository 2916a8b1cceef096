"""Steps whose tokens need later ones are refused, at the line that does it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from helpers_slices import S, attention_step

from rhino_jax.errors import TokenSliceError
from rhino_jax.transform.token_slices.sliced import sliced


def masked(mask, low=-1e9, axis=-1):
    """Attention under a mask [S, S]."""

    def attend(q, k, v, batch):
        scores = jnp.einsum("bqhk,bshk->bhqs", q, k)
        if mask is not None:
            scores = jnp.where(mask, scores, low)
        return jnp.einsum("bhqs,bshk->bqhk", jax.nn.softmax(scores, axis=axis), v)

    return attend


def refused(attend) -> TokenSliceError:
    apart, _ = attention_step(attend)
    with pytest.raises(TokenSliceError) as error:
        sliced(apart, (S // 2, S // 2))
    found = error.value
    assert all((found.what, found.where, found.numbers, found.fix))
    assert "test_refused_slices.py" in found.where
    return found


def test_attention_without_a_mask():
    assert "lets tokens read later ones" in refused(masked(None)).what


def test_attention_to_later_tokens_alone():
    refused(masked(jnp.triu(jnp.ones((S, S), bool))))


def test_a_mask_that_is_off_by_one():
    error = refused(masked(jnp.tril(jnp.ones((S, S), bool), k=1)))
    assert "token 0 may see token 1" in error.what


def test_a_running_sum_over_the_sequence():
    def attend(q, k, v, batch):
        return 0.5 * jnp.cumsum(v, axis=1)

    assert "`cumsum` needs all of the sequence" in refused(attend).what
