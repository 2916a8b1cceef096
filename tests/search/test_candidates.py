"""What the compiler is asked about: the best plan, recipes, runners-up."""

from __future__ import annotations

import pytest

from rhino_jax.frontend.trace import trace
from rhino_jax.hardware.files import load_target
from rhino_jax.ir.program import Program
from rhino_jax.models import registry
from rhino_jax.search.driver import make_candidates, make_plan, make_recipe_plans
from rhino_jax.search.records import Request


AXES = (("data", 2), ("model", 4))
TARGET = load_target("v5e:2x4")


def request(budget_bytes: float = TARGET.hbm_bytes) -> Request:
    return Request(memory_budget_bytes=budget_bytes, pins={}, output_pins={})


@pytest.fixture(scope="module")
def program() -> Program:
    workload = registry.get("gpt-tiny")
    return trace(workload.step, workload.abstract_args(), {}).program


def test_the_best_comes_first_then_a_recipe_and_all_differ(program: Program) -> None:
    found = make_candidates(program, [AXES], TARGET, request(), 5)
    best = make_plan(program, AXES, TARGET, request())
    assert found[0].name == "best"
    assert found[0].plan.decisions == best.decisions
    assert 2 <= len(found) <= 5
    recipe, _, density = found[1].name.partition("@")
    assert recipe in best.recipes and density == "matmul"
    assert not found[1].plan.decisions.says_stops
    for i, one in enumerate(found):
        assert one.plan.predicted.step_time_s >= best.predicted.step_time_s * 0.9999
        assert one.plan.predicted.peak_bytes <= TARGET.hbm_bytes
        assert all(one.plan.decisions != other.plan.decisions for other in found[:i])


def test_one_candidate_is_the_plan_itself(program: Program) -> None:
    (only,) = make_candidates(program, [AXES], TARGET, request(), 1)
    assert only.name == "best"


def test_other_meshes_are_candidates(program: Program) -> None:
    meshes = [(("x", 8),), (("x", 2), ("y", 4))]
    found = make_candidates(program, meshes, TARGET, request(), 20)
    assert {len(c.plan.mesh_axes) for c in found} == {1, 2}


def test_recipes_as_plans_cost_what_the_table_says(program: Program) -> None:
    plans = make_recipe_plans(program, AXES, TARGET, request())
    table = make_plan(program, AXES, TARGET, request()).recipes
    assert {n: p and p.predicted for n, p in plans.items()} == table
    assert any(plans.values())


def test_recipes_that_do_not_fit_are_plans_but_no_candidates(program: Program) -> None:
    plans = make_recipe_plans(program, AXES, TARGET, request())
    peaks = sorted(p.predicted.peak_bytes for p in plans.values() if p is not None)
    tight = request(peaks[-1] - 1)
    largest = {n for n, p in plans.items() if p and p.predicted.peak_bytes == peaks[-1]}
    found = make_candidates(program, [AXES], TARGET, tight, 20)
    assert not largest & {c.name.partition("@")[0] for c in found}
    assert all(c.plan.predicted.peak_bytes < peaks[-1] for c in found)
    again = make_recipe_plans(program, AXES, TARGET, tight)
    assert {n for n, p in again.items() if p} == {n for n, p in plans.items() if p}
