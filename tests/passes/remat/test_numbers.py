"""Steps that make values again give the numbers of the steps as they were written."""

from __future__ import annotations

import random
from typing import Any

import jax
import pytest

from rhino_jax.frontend.trace import Traced, trace
from rhino_jax.passes.remat.choice import RematChoice
from tests import helpers_models
from tests.cases import covering
from tests.passes.remat.saved import saved_values
from tests.passes.remat.stepped import (
    assert_same,
    compiled,
    interpreted,
    with_choice,
    workload,
)


MODELS = {
    "mlp-tiny": {},
    "gpt-tiny-unrolled": {"num_layers": 1},
    "gpt-tiny": {"remat": False},
    "rnn-tiny": {},
}
MORE_MODELS = {
    "gpt-tiny-unrolled": {"remat": True},
    "gpt-tiny": {},
    "llama-tiny": {"remat": False},
    "llama-tiny-unrolled": {},
    "moe-tiny": {},
    "t5-tiny": {},
    "two-tower-tiny": {},
    "unet-tiny": {},
    "wide-resnet-tiny": {},
    "decode-tiny": {},
}


def check(
    traced: Traced, args: object, seed: int, subsets: int = 1, run: Any = interpreted
) -> None:
    """Drop all that can be dropped, then random halves."""
    arrays = jax.tree.leaves(args)
    expected = run(traced)(*arrays)
    values = [k.value for k in saved_values(traced.program) if k.lines]
    rng = random.Random(seed)
    choices = [values]
    choices += [[v for v in values if rng.random() < 0.5] for _ in range(subsets)]
    for k, chosen in enumerate(choices):
        choice = RematChoice(recompute=tuple(chosen), ordered=k % 2 == 1)
        changed = with_choice(traced, choice)
        assert [e.path for e in changed.program.inputs] == [
            e.path for e in traced.program.inputs
        ]
        assert_same(run(changed)(*arrays), expected)


@pytest.mark.parametrize("name", MODELS)
def test_tiny_models(name: str) -> None:
    traced, args = workload(name, **MODELS[name])
    check(traced, args, seed=0)


@pytest.mark.parametrize("name", covering(["mlp-tiny", "gpt-tiny", "rnn-tiny"]))
def test_compiled_tiny_models(name: str) -> None:
    """Barriers and loops hold what is dropped apart, and change no number."""
    traced, args = workload(name, **MODELS[name])
    check(traced, args, seed=0, run=compiled)


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE_MODELS)
def test_more_tiny_models(name: str) -> None:
    traced, args = workload(name, **MORE_MODELS[name])
    check(traced, args, seed=1, subsets=3)


@pytest.mark.slow
def test_dropout_draws_the_same_numbers() -> None:
    step, args, _ = helpers_models.linen_cnn("sgd")
    traced = trace(step, args, {})
    assert any(op.name == "random_bits" for op in traced.program.ops)
    check(traced, args, seed=2)


@pytest.mark.parametrize(
    ("name", "run"),
    covering(
        [("mlp-tiny", compiled), ("gpt-tiny", interpreted), ("gpt-tiny", compiled)], 2
    ),
)
def test_values_that_wait_on_the_host(name: str, run: Any) -> None:
    """Of a CPU, that is where they are; the program is another."""
    traced, args = workload(name, **MODELS[name])
    kept = [k.value for k in saved_values(traced.program)]
    changed = with_choice(
        traced, RematChoice(recompute=tuple(kept[::3]), offload=tuple(kept))
    )
    moves = [op for op in changed.program.ops if op.name == "device_put"]
    assert len(moves) >= 2
    arrays = jax.tree.leaves(args)
    assert_same(run(changed)(*arrays), run(traced)(*arrays))


@pytest.mark.parametrize(
    ("count", "run"), covering([(1, interpreted), (2, interpreted), (2, compiled)])
)
def test_first_slices_are_kept(count: int, run: Any) -> None:
    traced, args = workload("gpt-tiny", remat=False, num_layers=3)
    stacks = [k for k in saved_values(traced.program) if k.forward is not None]
    (forward,) = {k.forward for k in stacks}
    assert forward is not None
    # Some are kept in all slices.
    dropped = tuple(k.value for k in stacks if k.lines)[:-4]
    changed = with_choice(
        traced, RematChoice(recompute=dropped, first=((forward, count),))
    )
    lengths = [
        op.call.trip_count
        for op in changed.program.ops
        if op.name == "scan" and op.call is not None
    ]
    assert lengths == [count, 3 - count, 3 - count, count]
    arrays = jax.tree.leaves(args)
    assert_same(run(changed)(*arrays), run(traced)(*arrays))
