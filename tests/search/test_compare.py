"""Meshes are compared briefly first; those that cannot be the best are left so."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from rhino_jax.analysis.program_analysis import ProgramAnalysis
from rhino_jax.frontend.trace import trace
from rhino_jax.hardware.files import load_target
from rhino_jax.hardware.layout import mesh_axis_names, mesh_shapes
from rhino_jax.models import registry
from rhino_jax.planner.search import compare
from rhino_jax.planner.search.compare import COMPARED, Comparison
from rhino_jax.planner.search.driver import find
from rhino_jax.planner.search.folding import first_choices
from rhino_jax.planner.search.mesh_problem import build_mesh_problem
from rhino_jax.planner.search.passes import SOLVE
from rhino_jax.planner.search.records import LIMITS, Request, SolvedMesh
from tests.cases import covering


@pytest.mark.parametrize(
    ("name", "fewer"), covering([("mlp-tensor", False), ("moe-tiny", True)])
)
def test_the_best_mesh_is_that_of_searches_on_all(
    name: str, fewer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fewer:  # As of a program whose searches take longer.
        monkeypatch.setattr(compare, "LIMITS", replace(LIMITS, unfolded_s=0.0))
    work, target = registry.get(name), load_target("v5e:4x4")
    program = trace(work.step, work.abstract_args(), {}).program
    analysis = ProgramAnalysis.of(program, target)
    solves: Counter[tuple[int, ...]] = Counter()

    def watch(done: object, form: object) -> None:
        if done is SOLVE:
            mesh = form.mesh_problem.model.mesh  # type: ignore[attr-defined]
            solves[mesh.sizes] += 1

    request = Request(
        memory_budget_bytes=2**40,
        pins={},
        output_pins={},
        level="fast",
        watch=watch,
    )
    meshes = [
        tuple(zip(mesh_axis_names(target, len(shape)), shape, strict=True))
        for shape in mesh_shapes(target, 16, max_axes=2)
    ]
    comparison = Comparison(analysis, request)
    comparison.run(meshes)
    assert {*comparison.objectives} == {*solves}
    assert any(count == 1 for count in solves.values()) == fewer
    assert comparison.solved[0].solution.objective == comparison.in_order[0][1]
    # Searches are within 3 % of their bounds, so that two searches of one mesh may
    # differ by as much: meshes are compared by one search of each.
    found: dict[tuple[int, ...], float] = {}
    for axes in meshes:
        mesh_problem = build_mesh_problem(analysis, axes, request)
        starts = first_choices(mesh_problem)
        solved = SOLVE.run(None, mesh_problem, COMPARED, request, starts)
        found[mesh_problem.model.mesh.sizes] = solved.solution.objective
    chosen = comparison.solved[0].mesh_problem.model.mesh.sizes
    # A second axis has to gain what tables show.
    assert found[chosen] <= (1.005 + LIMITS.second_axis_gain) * min(found.values())


def test_meshes_are_bounded_by_their_compute_before_they_are_searched() -> None:
    work, target = registry.get("mlp-tiny"), load_target("v5e:2x4")
    program = trace(work.step, work.abstract_args(), {}).program
    analysis = ProgramAnalysis.of(program, target)
    request = Request(2**40, {}, {}, level="fast")
    meshes = [
        tuple(zip(mesh_axis_names(target, len(shape)), shape, strict=True))
        for shape in mesh_shapes(target, 8, max_axes=2)
    ]
    bounds: list[float] = []

    def refuse(num_axes: int, least_s: float, best: SolvedMesh | None) -> float:
        bounds.append(least_s)
        raise StopIteration

    refused = Comparison(analysis, request, bound_axes=refuse)
    with pytest.raises(StopIteration):
        refused.run(meshes)
    assert not refused.objectives
    comparison = Comparison(analysis, request)
    comparison.run(meshes)
    for found in comparison.solved:
        labels = found.solution.labels
        assert labels is not None
        overlap = found.mesh_problem.overlap
        assert 0 < bounds[0] <= overlap.compute.objective(labels)


def test_the_best_mesh_stays_where_none_is_fast_enough() -> None:
    work, target = registry.get("mlp-tiny"), load_target("v5e:2x4")
    program = trace(work.step, work.abstract_args(), {}).program
    analysis = ProgramAnalysis.of(program, target)
    request = Request(2**40, {}, {}, level="fast", has_recipes=False)
    seen: list[float] = []

    def bound(num_axes: int, least_s: float, best: SolvedMesh | None) -> float:
        if best is None:
            return least_s / 2
        seen.append(best.solution.objective)
        return 1e-9

    comparison = Comparison(analysis, request, bound_axes=bound)
    comparison.run([[("x", 8)], [("x", 2), ("y", 4)]])
    assert comparison.solved and len(seen) == 2
    assert seen[-1] == comparison.in_order[0][1] < math.inf


@pytest.mark.slow
def test_a_search_starts_from_a_plan_that_is_like_it_and_stops_at_a_cutoff() -> None:
    work, target = registry.get("gpt-tiny"), load_target("v5e:2x4")
    program = trace(work.step, work.abstract_args(), {}).program
    request = Request(2**40, {}, {}, level="fast", has_recipes=False)
    mesh = [("data", 2), ("model", 4)]
    first = find(program, [mesh], target, request)
    again = find(program, [mesh], target, request, like=first)
    assert again.step_s <= first.step_s
    cut = find(program, [mesh], target, replace(request, cutoff_s=first.step_s / 2))
    solutions = [found.solved[0].solution for found in (cut, first)]
    assert first.step_s / 2 < solutions[0].bound < solutions[1].bound


def test_no_other_mesh_is_tried_where_nothing_fits_on_as_many_devices() -> None:
    work, target = registry.get("mlp-tiny"), load_target("v5e:2x4")
    program = trace(work.step, work.abstract_args(), {}).program
    analysis = ProgramAnalysis.of(program, target)
    tried = {}
    for budget in (2**10, 2**40):
        request = Request(budget, {}, {}, level="fast", has_recipes=False)
        comparison = Comparison(analysis, request)
        comparison.run([[("x", 8)], [("x", 2), ("y", 4)], [("x", 4), ("y", 2)]])
        tried[comparison.nothing_fits] = len(comparison.objectives)
    assert tried == {True: 1, False: 3}


@pytest.mark.parametrize(
    ("steps", "chosen"),
    [
        ({(8,): 59.7, (2, 4): 59.4}, (2, 4)),
        ({(8,): 59.42, (2, 4): 59.4}, (8,)),
        ({(2, 4): 59.7, (2, 2, 2): 59.4}, (2, 4)),
        ({(2, 4): 59.7, (2, 2, 2): 58.4}, (2, 2, 2)),
    ],
)
def test_of_two_axes_the_faster_mesh_is_taken(
    steps: dict[tuple[int, ...], float], chosen: tuple[int, ...]
) -> None:
    analysis: Any = None
    request = Request(2**40, {}, {}, level="fast")
    comparison = Comparison(analysis, request)
    comparison.objectives.update(steps)
    assert comparison.in_order[0][0] == chosen
    is_told = steps[chosen] > (1 + 1e-3) * min(steps.values())
    assert len(comparison.notes()) == is_told
    assert not is_told or "0.5%" in comparison.notes()[0]
