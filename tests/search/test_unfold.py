"""Repeats choose differently where memory binds, and no smaller budget is faster."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import rhino_jax as rhino
from rhino_jax.models import registry
from rhino_jax.planner.search.folding import solve_mesh_problem
from rhino_jax.planner.search.records import MeshProblem
from rhino_jax.planner.search.symmetry import Symmetry
from rhino_jax.solver.incumbents import EFFORTS
from rhino_jax.solver.overlap import Overlap
from rhino_jax.solver.problem import NodeUsage, Problem
from tests.search.zoo import WITHOUT_TILES, planned


@pytest.fixture(scope="module")
def sweep() -> list[rhino.Plan]:
    """Plan a GPT of layers that repeat under smaller and smaller budgets."""
    work = registry.get("gpt-tiny-unrolled", num_layers=4)
    plans: list[rhino.Plan] = []
    for share in (None, 0.65, 0.5):
        budget = share and int(share * plans[0].predicted.peak_bytes)
        plans.append(
            planned(
                work,
                {"data": 4, "model": 4},
                WITHOUT_TILES,
                memory_budget_bytes=budget or 2**34,
            )
        )
    return plans


def test_as_many_repeats_save_memory_as_must() -> None:
    """Of four that look alike two must save 10 each, at a second more; tied, all do."""
    count = 4
    problem = Problem(
        [np.array([1.0, 2.0])] * count,
        [],
        [NodeUsage(n, np.array([10.0, 0.0]), 0, 1) for n in range(count)],
        limit=20.0,
        end=1,
    )
    whole, symmetry = (
        Overlap.none(problem),
        Symmetry(np.zeros(count, int), np.zeros(1, int)),
    )
    any_model: Any = None
    case = MeshProblem(any_model, whole, any_model, symmetry, symmetry.overlap(whole))
    found = solve_mesh_problem(case, [np.ones(count, int)], EFFORTS["best"])
    assert found.labels is not None and sorted(found.labels) == [0, 0, 1, 1]
    assert found.objective == pytest.approx(6.0)
    assert found.bound <= 6.0 + 1e-9


@pytest.mark.slow
def test_a_smaller_budget_never_takes_less_time(sweep: list[rhino.Plan]) -> None:
    # Not by more than the search of the larger budget leaves open.
    for plan, smaller in itertools.pairwise(sweep):
        assert plan.search.bound_s <= smaller.search.objective_s
        assert plan.search.objective_s <= 1.005 * smaller.search.objective_s
    assert sweep[0].search.objective_s < sweep[-1].search.objective_s


@pytest.mark.slow
def test_plans_under_a_budget_fit_it_and_are_near_their_bounds(
    sweep: list[rhino.Plan],
) -> None:
    for plan in sweep:
        assert plan.predicted.peak_bytes <= plan.memory_budget_bytes
        assert plan.search.bound_s <= plan.search.objective_s
        assert plan.search.gap <= 0.04
