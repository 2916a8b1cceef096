"""What loops stack where a byte in a stack costs time."""

from __future__ import annotations

import math

import jax
import pytest

from rhino_jax import models
from rhino_jax.frontend.trace import trace
from rhino_jax.hardware.files import load_target
from rhino_jax.planner.search.driver import find
from rhino_jax.planner.search.records import Request
from rhino_jax.planner.search.remat.candidates import candidates_of
from rhino_jax.planner.search.remat.choice import (
    NOTHING_SAVED,
    Chosen,
    RematQuestion,
    ask,
    variants,
)


@pytest.fixture(scope="module")
def asked() -> RematQuestion:
    workload = models.get("gpt-tiny", layers="scan", remat=False)
    args = jax.eval_shape(lambda: workload.make_args(jax.random.key(0)))
    program = trace(workload.step, args, {}).program
    request = Request(
        math.inf, pins={}, output_pins={}, level="fast", has_recipes=False
    )
    found = find(program, [(("data", 4),)], load_target("h100:4"), request)
    return candidates_of(found.solved[0], may_offload=False).stacked_at(0.0)


def _least(asked: RematQuestion) -> Chosen:
    """The policy that saves least."""
    return next(variants(asked, NOTHING_SAVED))


def test_the_dearer_a_byte_the_less_is_stacked(asked: RematQuestion) -> None:
    kept, least = asked.all_saved, _least(asked).answer
    sizes = []
    for per_byte_s in (0.0, 1e-12, 1e-11, 1e-10, 1e-6):
        found = ask(asked.stacked_at(per_byte_s), math.inf, effort=2.5)
        some = found[0].answer if found else asked.stacked_at(per_byte_s).all_saved
        sizes.append(asked.stacked_bytes(some))
        # No worse than a policy, in which what several are made of counts once.
        for other in (kept, least):
            size = asked.stacked_bytes(other)
            cost_s = size * per_byte_s + other.added_s
            assert some.added_s <= 1.001 * cost_s + 1e-9
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == asked.stacked_bytes(kept)
    assert sizes[-1] <= asked.stacked_bytes(least) < sizes[0]


def test_memory_is_a_limit_too(asked: RematQuestion) -> None:
    least = _least(asked).answer
    budget = (asked.all_saved.peak_bytes + least.peak_bytes) / 2
    some = ask(asked, budget, effort=2.5)
    assert some and some[0].answer.peak_bytes <= budget
    assert not ask(asked, 0.5 * least.peak_bytes, effort=2.5)
