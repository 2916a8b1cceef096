"""Choices put together by CP-SAT, whose numbers are whole and fit into 64 bits."""

from __future__ import annotations

import numpy as np
import pytest

from rhino_jax.solver.incumbents import Effort
from rhino_jax.solver.moves.fusion import fuse
from rhino_jax.solver.pairwise import solve_pairwise
from rhino_jax.solver.problem import NodeUsage, PairTable, Problem


def ring(limit: float) -> Problem:
    """Three nodes of three options, the first of which are free and hold 3 each; the
    others hold 1, and cost less beside an equal one."""
    costs = [np.array([0.0, 1e-3, 2e-3])] * 3
    table = np.array([[0.0, 1e-3, 1e-3], [1e-3, 0.0, 1e-3], [1e-3, 1e-3, 0.0]])
    edges = [PairTable(i, j, table) for i, j in ((0, 1), (1, 2), (0, 2))]
    usages = [NodeUsage(n, np.array([3.0, 1.0, 1.0]), 0, 1) for n in range(3)]
    return Problem(costs, edges, usages, limit=limit, end=1)


@pytest.mark.parametrize(("limit", "best_s"), [(9.0, 0.0), (7.0, 3e-3), (3.0, 3e-3)])
def test_a_choice_that_costs_nothing_is_no_measure_of_what_others_cost(
    limit: float, best_s: float
) -> None:
    problem = ring(limit)
    free, dear = np.zeros(3, dtype=int), np.full(3, 2)
    fused = fuse(problem, free, [dear], Effort())
    assert fused.labels is not None
    assert problem.objective(fused.labels) == pytest.approx(best_s)
    assert problem.peak(fused.labels) <= limit
    assert fused.bound <= best_s + 1e-12
    found = solve_pairwise(problem, [free, dear], Effort())
    assert found.bound <= best_s + 1e-12
