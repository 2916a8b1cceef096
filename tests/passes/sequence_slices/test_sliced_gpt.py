"""A GPT whose sequence is cut in slices: forward, loss and backward."""

from __future__ import annotations

import pytest
from helpers_slices import check, of_zoo

from rhino_jax.attention import masks
from rhino_jax.errors import TokenSliceError
from rhino_jax.passes.sequence_slices import opened
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


def test_masks_of_equal_layers_are_evaluated_once(monkeypatch):
    evaluated = []

    def counted(eqn, operands):
        evaluated.append(eqn.primitive.name)
        return masks.evaluated(eqn, operands)

    monkeypatch.setattr(opened, "evaluated", counted)
    counts = []
    for layers in (1, 3):
        sequence_length(of_zoo("gpt-tiny-unrolled", num_layers=layers)[0])
        counts.append(evaluated.count("ge"))
        evaluated.clear()
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize("lengths", [(16, 15), (32, 0), (40, -8)], ids=str)
def test_lengths_have_to_make_up_the_sequence(gpt, lengths):
    with pytest.raises(TokenSliceError, match="do not make up the sequence") as error:
        sliced(gpt[0], lengths)
    assert "the sequence has 32" in error.value.numbers
