"""What stages of one program make again; and their plans asked, and planned again."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

from rhino_jax.errors import InfeasiblePlanError, PinError
from rhino_jax.ir.transform import RECOMPUTE
from rhino_jax.plan.plan import PlanData
from tests.cases import covering, without_reserve
from tests.passes.spmd_pipeline.helpers_one_program import LAYERS, train_step
from tests.planner.spmd_pipeline.helpers_one_program import (
    assert_two_steps_equal,
    clipped,
    planned,
    planned_clipped,
)


def deep(x: Any, w: Any) -> Any:
    """A layer that leaves more for its backward pass than it takes to make again."""
    for _ in range(4):
        x = x + jnp.tanh(jnp.sin(x) @ w["w"] + w["b"])
    return x


@pytest.mark.slow
@pytest.mark.parametrize("layer", [deep, jax.checkpoint(deep)], ids=["kept", "remat"])
def test_what_is_made_again_is_chosen_by_predicted_time(layer: Any) -> None:
    step, args = train_step(layer, tx=optax.sgd(0.01))
    plan = planned(step, args, hardware="h100", level="best")
    times = {v.name: v.step_time_s for v in plan.variants}
    chosen = [v.name for v in plan.variants if v.is_chosen]
    assert len(times) > 1 and len(chosen) == 1
    assert times[chosen[0]] <= 1.03 * min(times.values())
    assert_two_steps_equal(step, args, plan)
    for said in ("as written", "none"):
        other = planned(step, args, hardware="h100", recompute=said)
        assert RECOMPUTE not in [t.name for t in other.transforms]
        assert other.variants == ()


def test_layers_make_again_what_would_not_fit() -> None:
    step, args = train_step(deep, tx=optax.sgd(0.1))
    rows = jax.ShapeDtypeStruct((4096, args[2].shape[1]), jnp.float32)
    args = *args[:2], rows, rows, args[4]
    written = planned(step, args, recompute="as written", hardware="v5e:2x4")
    budget = int(0.6 * written.predicted.peak_bytes)
    asked = {"hardware": without_reserve("v5e:2x4"), "memory_budget_bytes": budget}
    with pytest.raises(InfeasiblePlanError, match="one program of 2 stages") as found:
        planned(step, args, recompute="as written", **asked)
    assert "4 micro-batches" in found.value.numbers
    plan = planned(step, args, **asked)
    assert RECOMPUTE in [t.name for t in plan.transforms]
    assert plan.predicted.peak_bytes <= budget
    assert any("make some again" in note for note in plan.notes)


ASKED = {"level": "best", "recompute": "as written"}


@pytest.fixture(scope="module")
def plan() -> PlanData:
    """The plan that `why` is asked of."""
    return planned(*clipped(), **ASKED)


@pytest.mark.parametrize("key", covering(["*['w']", "params['in']", "x"]))
def test_why_says_what_planning_with_that_pin_finds(key: str, plan: PlanData) -> None:
    step, args = clipped()
    why = plan.why(key)
    assert why.planned_s == pytest.approx(plan.predicted.step_time_s)
    (own,) = [x for x in why.layouts if x.is_planned]
    is_stack = key == "*['w']"
    assert why.type == {"*['w']": f"float32[{LAYERS},16,16]"}.get(key, "float32[16,16]")
    assert ("stage" in own.spec) == is_stack
    assert len(why.layouts) > 1
    for layout in why.layouts:
        assert ("stage" in layout.spec) == is_stack
        pins = {key: layout.partition_spec}
        pinned = planned(step, args, pins=pins, **ASKED).predicted.step_time_s
        assert layout.bound_s <= pinned * (1 + 1e-6)
        gap = 1 - layout.bound_s / layout.step_s
        assert pinned == pytest.approx(layout.step_s, rel=gap + 1e-3)
        again = plan.with_(pins=pins)
        assert again.predicted.step_time_s == pytest.approx(layout.step_s, rel=1e-3)
        (one,) = [
            x
            for x in plan.why_not(key, layout.partition_spec).layouts
            if x.spec == layout.spec
        ]
        assert one.step_s == pytest.approx(layout.step_s, rel=gap + 1e-3)


@pytest.mark.parametrize(
    "key, asked, said",
    [
        ("params['in']", P("stage"), "only stacks of layers"),
        ("*['w']", P(None, "stage"), "only stacks of layers"),
        ("*['w']", P("data"), "does not divide"),
        ("*['w']", 1, "equal parts of all layers"),
    ],
    ids=str,
)
def test_why_not_says_what_cannot_be(key: str, asked: Any, said: str) -> None:
    why = planned_clipped().why_not(key, asked)
    (cannot,) = [x.cannot for x in why.layouts if x.cannot]
    assert said in cannot


def test_it_is_planned_again_from_where_it_is() -> None:
    plan = planned(*clipped())
    plan.origin.solved = None  # as of a plan that the cache had
    pins = {"*['w']": P("stage", "data")}
    again = plan.with_(pins=pins)
    assert again.schedule == "one-program"
    assert again.in_specs[0]["layers"]["w"] == P("stage", "data")
    assert again.predicted.step_time_s > plan.predicted.step_time_s
    assert again.with_(pins={"*['in']": P("data")}).in_specs[0]["in"] == P("data")
    less = plan.with_(memory_budget_bytes=plan.predicted.peak_bytes - 1)
    assert less.schedule == "one-program"
    assert less.predicted.peak_bytes < plan.predicted.peak_bytes
    with pytest.raises(PinError, match="only stacks of layers"):
        plan.with_(pins={"*['in']": P("stage")})


@pytest.mark.slow
def test_two_steps_equal_one_device_once_it_is_planned_again() -> None:
    again = planned_clipped().with_(pins={"*['w']": P("stage", "data")})
    assert_two_steps_equal(*clipped(), again)
