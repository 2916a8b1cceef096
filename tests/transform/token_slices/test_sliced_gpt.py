"""A GPT whose sequence is cut in slices: forward, loss and backward."""

from __future__ import annotations

import pytest
from helpers_slices import check, of_zoo

from rhino_jax.errors import TokenSliceError
from rhino_jax.transform.token_slices.sliced import sequence_length, sliced


@pytest.fixture(scope="module")
def gpt():
    return of_zoo("gpt-tiny-unrolled")


def test_a_gpt_is_the_same_in_two_slices(gpt):
    check(*gpt, (5, 27))


@pytest.mark.slow
@pytest.mark.parametrize(
    "lengths", [(32,), (16, 16), (16, 10, 6), (1, 12, 12, 7)], ids=str
)
def test_a_gpt_is_the_same_in_slices(gpt, lengths):
    check(*gpt, lengths)


def test_the_sequence_is_found(gpt):
    assert sequence_length(gpt[0]) == 32


@pytest.mark.parametrize("lengths", [(16, 15), (32, 0), (40, -8)], ids=str)
def test_lengths_have_to_make_up_the_sequence(gpt, lengths):
    with pytest.raises(TokenSliceError, match="do not make up the sequence") as error:
        sliced(gpt[0], lengths)
    assert "the sequence has 32" in error.value.numbers
