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
from rhino_jax.planner.search.remat.stacked import Stacking


@pytest.fixture(scope="module")
def stacking() -> Stacking:
    workload = models.get("gpt-tiny", layers="scan", remat=False)
    args = jax.eval_shape(lambda: workload.make_args(jax.random.key(0)))
    program = trace(workload.step, args, {}).program
    request = Request(
        math.inf, pins={}, output_pins={}, level="fast", has_recipes=False
    )
    found = find(program, [(("data", 4),)], load_target("h100:4"), request)
    return Stacking.of(found.solved[0])


def test_the_dearer_a_byte_the_less_is_stacked(stacking: Stacking) -> None:
    kept, least = stacking.all_kept(), stacking.nothing_saved()
    assert kept is not None and least is not None
    sizes = []
    for per_byte_s in (0.0, 1e-12, 1e-11, 1e-10, 1e-6):
        some = stacking.cheapest(per_byte_s, float(1 << 62), 5.0)
        assert some is not None
        sizes.append(stacking.stacked_bytes(some))
        # No worse than a policy, in which what several are made of counts once.
        for other in (kept, least):
            size = stacking.stacked_bytes(other)
            cost_s = size * per_byte_s + other.answer.added_s
            assert some.answer.added_s <= 1.001 * cost_s + 1e-9
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == stacking.stacked_bytes(kept)
    assert sizes[-1] <= stacking.stacked_bytes(least) < sizes[0]


def test_memory_is_a_limit_too(stacking: Stacking) -> None:
    kept, least = stacking.all_kept(), stacking.nothing_saved()
    assert kept is not None and least is not None
    budget = (kept.answer.peak_bytes + least.answer.peak_bytes) / 2
    some = stacking.cheapest(0.0, budget, 5.0)
    assert some is not None and some.answer.peak_bytes <= budget
    assert stacking.cheapest(0.0, 0.5 * least.answer.peak_bytes, 5.0) is None
