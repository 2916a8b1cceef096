"""Axes across ops: where dims are split and merged, and where no factor holds them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from rhino_jax.frontend.rules.reshape import reshape_rule
from rhino_jax.ir.axes import AxisSpan, follow
from rhino_jax.ir.factor import parse_rule


def labels(shape: Sequence[int], span: AxisSpan) -> np.ndarray:
    """Index of the axis at every element of an array."""
    split = span.split(shape, span.size)
    along = [1] * len(split)
    along[span.dim + 1] = span.size
    found = np.broadcast_to(np.arange(span.size).reshape(along), split)
    return found.reshape(shape)


B, S, H = 2, 3, 4
BATCH, SEQUENCE, HEADS = AxisSpan(0, B), AxisSpan(1, S), AxisSpan(2, H)


@pytest.mark.parametrize("span", [BATCH, SEQUENCE, HEADS])
@pytest.mark.parametrize("to", [(B * S, H), (B, S * H), (B * S * H,), (B, S, 2, 2)])
def test_a_reshape_carries_an_axis_there_and_back(
    span: AxisSpan, to: tuple[int, ...]
) -> None:
    shape = B, S, H
    rule = reshape_rule(shape, to)
    made = follow(rule, rule.operands[0], span, rule.results[0])
    if made is None:  # two factors hold it
        assert (span, to) == (HEADS, (B, S, 2, 2))
        return
    expected = labels(shape, span).reshape(to)
    np.testing.assert_array_equal(labels(to, made), expected)
    assert follow(rule, rule.results[0], made, rule.operands[0]) == span


def test_a_part_of_a_factor_and_a_slice_of_an_axis_are_carried() -> None:
    rule = parse_rule(
        "(b s) d, d f -> (b s) f", [(6, 4), (4, 5)], [(6, 5)], sizes={"b": 2}
    )
    tokens, weight = rule.operands
    columns = AxisSpan(0, S, outer=B, first=7)
    assert follow(rule, tokens, columns, rule.results[0]) == columns
    half = AxisSpan(1, 2, inner=2)  # pairs of features
    assert follow(rule, tokens, half, weight) == AxisSpan(0, 2, inner=2)
    assert follow(rule, tokens, half, rule.results[0]) is None  # contracted
    assert follow(rule, tokens, AxisSpan(0, 3, inner=2), rule.results[0]) is None
    assert columns.within(6, 9) == (0, 2)
