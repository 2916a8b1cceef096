"""Choices that hold little memory, and repeats that fit only where they differ."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rhino_jax.planner.search.folding import solve_mesh_problem
from rhino_jax.planner.search.records import MeshProblem
from rhino_jax.planner.search.symmetry import Symmetry
from rhino_jax.solver.incumbents import EFFORTS
from rhino_jax.solver.least_peak import least_possible, smallest_peak
from rhino_jax.solver.overlap import NOTHING_HIDES, Overlap, Slack, Wait
from rhino_jax.solver.problem import EdgeUsage, NodeUsage, Problem
from rhino_jax.solver.solve import solve_overlapped


@pytest.mark.parametrize("seed", range(10))
def test_the_smallest_peak_is_near_that_of_any_choice(seed: int) -> None:
    rng = np.random.default_rng(seed)
    usages = [
        NodeUsage(n, rng.random(3), int(t), int(t) + 3)
        for n in range(6)
        for t in rng.integers(0, 5, size=2)
    ]
    pairs = [EdgeUsage(n, n + 1, rng.random((3, 3)), n, n + 2) for n in range(5)]
    problem = Problem([np.zeros(3)] * 6, [], usages, pairs, 0.0, 8)
    least = min(problem.peak(np.array(c)) for c in np.ndindex(*[3] * 6))
    found = problem.peak(smallest_peak(problem))
    assert least_possible(problem) <= least <= found <= 1.3 * least


@pytest.mark.parametrize("count", [2, 6])
def test_nodes_that_are_alike_are_told_apart_where_only_that_fits(count: int) -> None:
    """Option 0 holds 10 in the first hour, option 1 in the second."""
    problem = Problem(
        [np.zeros(2)] * count,
        [],
        [
            NodeUsage(n, np.array(usage), t, t + 1)
            for n in range(count)
            for t, usage in enumerate(([10.0, 0.0], [0.0, 10.0]))
        ],
        limit=5.0 * count,
        end=2,
    )
    assert problem.peak(smallest_peak(problem)) == 5.0 * count


def test_repeats_choose_differently_where_only_that_fits() -> None:
    """Two nodes that look alike, on each other's sides of one hour: option 0 holds 10
    in the first, option 1 holds 10 in the second."""
    problem = Problem(
        [np.array([1.0, 1.0])] * 2,
        [],
        [
            NodeUsage(n, np.array(usage), t, t + 1)
            for n in range(2)
            for t, usage in enumerate(([10.0, 0.0], [0.0, 10.0]))
        ],
        limit=10.0,
        end=2,
    )
    whole = Overlap.of(
        problem,
        [np.zeros(2)] * 2,
        Slack((Wait.NONE, Wait.NONE), ()),
        share=0.0,
        shares=NOTHING_HIDES,
    )
    symmetry = Symmetry(np.zeros(2, dtype=np.int64), np.zeros(1, dtype=np.int64))
    folded = symmetry.overlap(whole)
    together = solve_overlapped(folded, [], EFFORTS["best"], lambda best, bound: None)
    assert together.labels is None
    any_model: Any = None
    case = MeshProblem(any_model, whole, any_model, symmetry, folded)
    found = solve_mesh_problem(case, [np.zeros(2, dtype=np.int64)], EFFORTS["best"])
    assert found.labels is not None and sorted(found.labels) == [0, 1]
    assert found.peak == 10.0 and found.objective == pytest.approx(2.0)
