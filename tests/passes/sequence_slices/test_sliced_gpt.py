"""A GPT whose sequence is cut in slices: forward, loss and backward."""

from __future__ import annotations

import pytest
from helpers_slices import check, of_zoo

from rhino_jax.errors import TokenSliceError
from rhino_jax.passes.sequence_slices.analysis import fitting
from rhino_jax.passes.sequence_slices.opened import opened
from rhino_jax.passes.sequence_slices.sliced import sequence_length, sliced
from tests.cases import covering
from tests.passes.interpreter import interpret
from tests.passes.zoo import compiled


@pytest.fixture(scope="module")
def gpt():
    return of_zoo("gpt-tiny-unrolled")


@pytest.mark.parametrize(
    ("lengths", "run"),
    covering(
        [
            *((n, interpret) for n in ((5, 27), (32,), (16, 10, 6), (1, 12, 12, 7))),
            ((16, 16), compiled),
        ]
    ),
)
def test_a_gpt_is_the_same_in_slices(gpt, lengths, run):
    check(*gpt, lengths, run)


def test_the_sequence_is_found(gpt):
    assert sequence_length(gpt[0]) == 32


def test_masks_of_equal_layers_are_one():
    apart, _ = of_zoo("gpt-tiny-unrolled", num_layers=3)
    corners = fitting(apart, opened(apart, [32]), [32]).corners
    chosen = [parts for name, _, parts in corners.made if name == "select_n"]
    assert 0 < len(chosen) <= 3  # by row, by column, and of gradients


@pytest.mark.parametrize("lengths", [(16, 15), (32, 0), (40, -8)], ids=str)
def test_lengths_have_to_make_up_the_sequence(gpt, lengths):
    with pytest.raises(TokenSliceError, match="do not make up the sequence") as error:
        sliced(gpt[0], lengths)
    assert "the sequence has 32" in error.value.numbers
