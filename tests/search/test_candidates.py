"""What the compiler is asked about: the best plan, recipes, runners-up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rhino_jax.frontend.trace import trace
from rhino_jax.hardware.files import load_target
from rhino_jax.ir.program import Program
from rhino_jax.models import registry
from rhino_jax.plan.plan import PlanData
from rhino_jax.planner.search.driver import (
    find,
    make_candidates,
    make_recipe_plans,
)
from rhino_jax.planner.search.records import Request


AXES = (("data", 2), ("model", 2))
TARGET = load_target("v5e:2x2")


def request(budget_bytes: float = TARGET.device.hbm_bytes) -> Request:
    return Request(
        memory_budget_bytes=budget_bytes, pins={}, output_pins={}, level="fast"
    )


@pytest.fixture(scope="module")
def program() -> Program:
    workload = registry.get("gpt-tiny")
    return trace(workload.step, workload.abstract_args(), {}).program


@pytest.fixture(scope="module")
def best(program: Program) -> PlanData:
    return find(program, [AXES], TARGET, request()).plan()


@pytest.fixture(scope="module")
def recipes(program: Program) -> dict[str, PlanData | None]:
    """Plans of every recipe at its best."""
    return make_recipe_plans(program, AXES, TARGET, request())


def test_the_best_comes_first_then_a_recipe_and_all_differ(
    program: Program, best: PlanData
) -> None:
    found = make_candidates(program, [AXES], TARGET, request(), 5)
    assert found[0].name == "best"
    assert found[0].plan.decisions == best.decisions
    recipe, _, density = found[1].name.partition("@")
    assert recipe in best.recipes and density == "matmul"
    assert not found[1].plan.decisions.lowering.annotates_waypoints
    own = [c for c in found if not c.name.endswith("@batch")]
    assert 2 <= len(own) <= 5
    for i, one in enumerate(found):
        assert one.plan.predicted.step_time_s >= best.predicted.step_time_s * 0.9999
        assert one.plan.predicted.peak_bytes <= TARGET.device.hbm_bytes
        assert all(one.plan.decisions != other.plan.decisions for other in found[:i])


@pytest.fixture(scope="module")
def plenty() -> Program:
    """Of batch: data parallelism is as good as anything."""
    workload = registry.get("gpt-tiny", batch=1024)
    return trace(workload.step, workload.abstract_args(), {}).program


@pytest.fixture(scope="module")
def plain_plans(plenty: Program) -> dict[str, PlanData | None]:
    asked = replace(request(), density="batch")
    return make_recipe_plans(plenty, AXES, TARGET, asked)


def test_plain_recipes_come_along_whatever_the_count(
    plenty: Program, plain_plans: dict[str, PlanData | None]
) -> None:
    first, *plain = make_candidates(plenty, [AXES], TARGET, request(), 1)
    assert first.name == "best"
    predicted = {
        f"{n}@batch": p.predicted.step_time_s for n, p in plain_plans.items() if p
    }
    assert set(predicted) == {"dp@batch", "zero1@batch", "fsdp@batch"}
    limit = 1.3 * first.plan.predicted.step_time_s
    assert {c.name for c in plain} == {n for n, s in predicted.items() if s <= limit}
    assert "dp@batch" in {c.name for c in plain}


def test_plain_recipes_far_above_the_plan_are_left_out_and_said(
    program: Program,
) -> None:
    axes, target = (("data", 2), ("model", 4)), load_target("v5e:2x4")
    best, *plain = make_candidates(program, [axes], target, request(), 1)
    assert best.name == "best"
    assert {c.name for c in plain} <= {"dp@batch", "zero1@batch"}
    (note,) = [n for n in best.plan.notes if "not compiled" in n]
    assert "fsdp@batch (" in note and "times the plan" in note


def test_plain_recipes_say_arguments_and_the_batch_only(
    plenty: Program, plain_plans: dict[str, PlanData | None]
) -> None:
    both = (0, 1)
    outside = {e.value for e in (*plenty.inputs, *plenty.outputs)}
    for name, plan in plain_plans.items():
        assert plan is not None
        decisions = plan.decisions
        inner = [s for v, s in decisions.values.items() if v not in outside]
        assert len(inner) > 100
        assert all(s[0] == both and not any(s[1:]) for s in inner)
        assert not decisions.operands and not decisions.lowering.annotates_waypoints
        cut = {leaf.path: any(leaf.spec) for leaf in plan.inputs}
        assert cut["params['blocks']['mlp']['up']"] == (name == "fsdp")
        # Over all of the mesh, and one dim, as people type it.
        assert all([d for d in i.spec if d] in ([], [both]) for i in plan.inputs)


@pytest.mark.slow
def test_other_meshes_are_candidates(program: Program) -> None:
    meshes = [(("x", 4),), (("x", 2), ("y", 2))]
    found = make_candidates(program, meshes, TARGET, request(), 20)
    assert {len(c.plan.mesh_axes) for c in found} == {1, 2}


def test_recipes_as_plans_cost_what_the_table_says(
    best: PlanData, recipes: dict[str, PlanData | None]
) -> None:
    assert {n: p and p.predicted for n, p in recipes.items()} == best.recipes
    assert any(recipes.values())


@pytest.mark.slow
def test_recipes_that_do_not_fit_are_plans_but_no_candidates(
    program: Program, recipes: dict[str, PlanData | None]
) -> None:
    plans = recipes
    peaks = sorted(p.predicted.peak_bytes for p in plans.values() if p is not None)
    tight = request(peaks[-1] - 1)
    largest = {n for n, p in plans.items() if p and p.predicted.peak_bytes == peaks[-1]}
    found = make_candidates(program, [AXES], TARGET, tight, 20)
    own = [c.name for c in found if not c.name.endswith("@batch")]
    assert not largest & {name.partition("@")[0] for name in own}
    assert all(c.plan.predicted.peak_bytes < peaks[-1] for c in found)
    again = make_recipe_plans(program, AXES, TARGET, tight)
    assert {n for n, p in again.items() if p} == {n for n, p in plans.items() if p}
