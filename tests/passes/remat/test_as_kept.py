"""`jax.checkpoint` as a wish: what it computes twice can be kept instead."""

from __future__ import annotations

from typing import Any

import jax
import pytest

from rhino_jax.frontend.trace import Traced
from rhino_jax.ir.transform import Transform
from rhino_jax.passes.apply import apply_passes
from rhino_jax.passes.remat.choice import RematChoice
from rhino_jax.passes.remat.unremat import ALL, has_remat
from tests.cases import covering
from tests.passes.remat.saved import saved_values
from tests.passes.remat.stepped import (
    assert_same,
    compiled,
    flops,
    interpreted,
    with_choice,
    workload,
)


@pytest.mark.parametrize(
    ("name", "changes"),
    covering(
        [
            ("gpt-tiny", {}),
            ("gpt-tiny-unrolled", {"remat": True, "num_layers": 1}),
        ]
    ),
)
def test_equal_and_without_remat(name: str, changes: dict[str, Any]) -> None:
    traced, args = workload(name, **changes)
    arrays = jax.tree.leaves(args)
    kept = apply_passes(traced, [Transform("un-remat", 0, 0, ALL)])
    assert has_remat(traced.program) and not has_remat(kept.program)
    expected = interpreted(traced)(*arrays)
    assert_same(interpreted(kept)(*arrays), expected)
    plain = products(workload(name, **{**changes, "remat": False})[0])
    assert products(kept) == plain < products(traced)
    # And what is kept now may be dropped again.
    values = tuple(k.value for k in saved_values(kept.program) if k.lines)
    again = with_choice(kept, RematChoice(recompute=values))
    assert_same(interpreted(again)(*arrays), expected)
    assert products(again) > plain


def products(traced: Traced) -> int:
    """Return how many products a step runs."""
    walk = traced.program.walk()
    return sum(count for op, count in walk if op.name == "dot_general")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("gpt-tiny-unrolled", {"remat": True, "num_layers": 1}),
        ("gpt-tiny", {}),
        ("llama-tiny", {}),
        ("gpt-tiny-unrolled", {"remat": True}),
    ],
)
def test_equal_and_cheaper(name: str, changes: dict[str, Any]) -> None:
    traced, args = workload(name, **changes)
    arrays = jax.tree.leaves(args)
    kept = apply_passes(traced, [Transform("un-remat", 0, 0, ALL)])
    assert has_remat(traced.program)
    assert not has_remat(kept.program)
    before, after = compiled(traced), compiled(kept)
    expected = before(*arrays)
    assert_same(after(*arrays), expected)
    plain = compiled(workload(name, **{**changes, "remat": False})[0])
    assert flops(after) == pytest.approx(flops(plain), rel=5e-3)
    assert flops(before) > 1.1 * flops(plain)
    # And what is kept now may be dropped again.
    values = tuple(k.value for k in saved_values(kept.program) if k.lines)
    again = compiled(with_choice(kept, RematChoice(recompute=values)))
    assert_same(again(*arrays), expected)
    assert flops(again) > 1.1 * flops(after)


def test_what_is_as_written_is_not_touched() -> None:
    traced, _ = workload("gpt-tiny")
    assert has_remat(traced.program)
    assert not has_remat(workload("mlp-tiny")[0].program)
    assert apply_passes(traced, [Transform("un-remat", 0, 0, "")]) is traced
