"""Corrections: which factor an op gets, and how several programs are taken together."""

from __future__ import annotations

import pytest

from rhino_jax.cost.corrections import (
    NO_CORRECTIONS,
    CostCorrections,
    CostFactors,
    OpTimes,
    kind_of_sharding,
    op_key,
)
from rhino_jax.ir.program import Source


LINE = "model.py:7 (mlp)"


def times(direction: str, sharding: str, asked: float, made: float) -> OpTimes:
    return OpTimes(LINE, direction, "dot_general", sharding, asked, made)


ONE = CostCorrections(
    1, (times("forward", "0", 1.0, 2.0), times("forward", "1", 3.0, 3.0)), 4.0
)


@pytest.mark.parametrize(
    ("direction", "primitive", "sharding", "factor"),
    [
        ("forward", "dot_general", "0", 2.0),
        ("forward", "dot_general", "1", 1.0),
        ("forward", "dot_general", "0,1", 5 / 4),  # as all that were compiled
        ("recomputed", "dot_general", "0", 5 / 4),
        ("forward", "add", "0", 1.0),
    ],
)
def test_an_op_has_the_factor_of_what_is_most_like_it(
    direction: str, primitive: str, sharding: str, factor: float
) -> None:
    factors = CostFactors.of(ONE)
    assert factors.of_op((LINE, direction, primitive), sharding) == factor


def test_programs_are_taken_together() -> None:
    other = CostCorrections(1, (times("forward", "0", 1.0, 4.0),), 1.0)
    both = ONE.and_of(other)
    assert (both.programs, both.communication) == (2, 2.0)
    assert times("forward", "0", 2.0, 6.0) in both.ops and len(both.ops) == 2
    assert ONE.and_of(NO_CORRECTIONS) == NO_CORRECTIONS.and_of(ONE) == ONE
    assert (str(ONE), str(both)) == ("1 compiled program", "2 compiled programs")


def test_those_of_the_plan_that_is_taken_are_preferred() -> None:
    other = CostCorrections(1, (times("forward", "0", 1.0, 4.0),), 1.0)
    both = other.preferred_to(ONE.and_of(other))
    assert (both.programs, both.communication) == (2, 1.0)
    factors = CostFactors.of(both)
    found = [factors.of_op((LINE, "forward", "dot_general"), k) for k in "01"]
    assert found == [4.0, 1.0]
    assert NO_CORRECTIONS.preferred_to(ONE) == ONE


def test_ops_are_told_apart_by_line_and_direction() -> None:
    forward = Source("/a/model.py", 7, "mlp", "jvp(mlp)")
    backward = Source("/a/model.py", 7, "mlp", "transpose(jvp(mlp))")
    again = Source("/a/model.py", 7, "mlp", "transpose(jvp())/rematted_computation")
    found = [op_key(s, "dot_general")[:2] for s in (forward, backward, again)]
    assert found == [(LINE, "forward"), (LINE, "backward"), (LINE, "recomputed")]
    assert op_key(Source(), "add")[0] == ""
    assert kind_of_sharding(((0, 1), (), (2,))) == "0,2"
