"""What planning does to the process it runs in."""

from __future__ import annotations

import gc
import math
from typing import Any

import pytest

import rhino_jax as rhino
from rhino_jax.analysis.program_analysis import ProgramAnalysis
from rhino_jax.errors import InfeasiblePlanError
from rhino_jax.frontend.trace import trace
from rhino_jax.hardware.files import load_target
from rhino_jax.models import registry
from rhino_jax.planner.search.folding import with_recipes
from rhino_jax.planner.search.mesh_problem import build_mesh_problem
from rhino_jax.planner.search.records import Request
from rhino_jax.solver.incumbents import RECIPE_EFFORTS
from tests.search.zoo import planned


def test_garbage_is_collected_again_after_planning() -> None:
    met: list[bool] = []
    options = {"hardware": "v5e:4", "mesh": {"data": 4}}
    planned("mlp-tiny", **options, progress=lambda *_: met.append(gc.isenabled()))
    assert met and not any(met)
    assert gc.isenabled()
    with pytest.raises(InfeasiblePlanError):
        planned("mlp-tiny", **options, memory_budget_bytes=1)
    assert gc.isenabled()
    gc.disable()
    try:
        planned("mlp-tiny", **options)
        assert not gc.isenabled(), "who had it off finds it off"
    finally:
        gc.enable()


WORTH_LITTLE = 1.0005
"""The recipes of tiny models are close together."""


def test_only_recipes_that_are_no_choice_are_searched_less() -> None:
    work = registry.get("llama-tiny-unrolled")
    program = trace(work.step, work.abstract_args(), {}).program
    axes, target = [("data", 2), ("model", 2)], load_target("v5e:2x2")
    mesh_problem = build_mesh_problem(
        ProgramAnalysis.of(program, target), axes, Request(1e12, {}, {})
    )
    whole, less = (
        {
            name: mesh_problem.overlap.problem.objective(labels)
            for name, labels in with_recipes(
                mesh_problem, effort, worth
            ).recipes.items()
            if labels is not None
        }
        for effort in [RECIPE_EFFORTS["best"]]
        for worth in (math.inf, WORTH_LITTLE)
    )
    least = whole["dp"]
    for name, cost in whole.items():
        is_choice = less[name] <= WORTH_LITTLE * least
        assert less[name] == cost if is_choice else less[name] >= cost
        least = min(least, less[name])
    assert max(whole.values()) > WORTH_LITTLE * least


@pytest.mark.parametrize("level", ["fast", "best"])
@pytest.mark.parametrize("step", [lambda x: x + 1, lambda x: x, lambda x: (x, 0.0)])
def test_a_program_of_scalars_has_nothing_to_choose(step: Any, level: str) -> None:
    mesh = {"data": 4, "model": 2}
    found = rhino.plan(step, 1.0, mesh=mesh, hardware="v5e:4x2", level=level)
    assert found.predicted.step_time_s == 0
    assert found.inputs[0].spec == ()
