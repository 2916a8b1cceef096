"""Where the memory limit binds: against enumeration, and over a sweep of budgets."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from rhino_jax.solver import solve
from rhino_jax.solver.bounds.prices import Mixture
from rhino_jax.solver.incumbents import EFFORTS, Effort
from rhino_jax.solver.overlap import Overlap, Slack, Wait
from rhino_jax.solver.problem import EdgeUsage, Labels, NodeUsage, PairTable, Problem
from rhino_jax.solver.solve import solve_overlapped


def random_overlap(seed: int, limit: float) -> Overlap:
    """Five nodes with memory over eight times, half of whose costs can hide."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(2, 5, size=5).tolist()
    edges = [
        PairTable(i, j, rng.random((sizes[i], sizes[j])))
        for i in range(5)
        for j in range(i + 1, 5)
        if rng.random() < 0.5
    ]
    nodes = [
        NodeUsage(i, rng.random(k) * 1e6, int(t), int(t) + 3)
        for i, k in enumerate(sizes)
        for t in rng.integers(0, 5, size=2)
    ]
    pairs = [
        EdgeUsage(e.source, e.target, rng.random(e.table.shape) * 1e6, 3, 6)
        for e in edges[:2]
    ]
    costs = [rng.random(k) for k in sizes]
    compute = [c * rng.random(len(c)) for c in costs]
    slack = Slack(
        tuple(Wait.LATER * int(x < 0.5) for x in rng.random(5)),
        tuple(Wait.LATER * int(x < 0.5) for x in rng.random(len(edges))),
    )
    problem = Problem(costs, edges, nodes, pairs, limit, 8)
    return Overlap.of(problem, compute, slack, share=0.6, shares={Wait.LATER: 0.8})


def all_choices(problem: Problem) -> list[Labels]:
    return [np.array(c) for c in np.ndindex(*(len(c) for c in problem.costs))]


@pytest.mark.parametrize("level", EFFORTS)
@pytest.mark.parametrize("limit", [3e6, 2.5e6, 2.2e6])
@pytest.mark.parametrize("seed", range(10))
def test_random_problems_are_bounded_and_near_brute_force(
    seed: int, limit: float, level: str
) -> None:
    overlap = random_overlap(seed, limit)
    problem = overlap.problem
    fitting = [c for c in all_choices(problem) if problem.peak(c) <= limit]
    best = min(map(overlap.step_s, fitting), default=math.inf)
    found = solve_overlapped(overlap, [], EFFORTS[level], lambda best, bound: None)
    if math.isinf(best):
        assert found.labels is None
        return
    assert found.labels is not None
    assert problem.peak(found.labels) <= limit
    assert found.objective == pytest.approx(overlap.step_s(found.labels))
    assert found.bound <= best * (1 + 1e-9)
    assert best * (1 - 1e-9) <= found.objective <= 1.2 * best


@pytest.mark.parametrize("level", EFFORTS)
def test_a_cutoff_ends_the_search_only_where_nothing_that_fits_is_shorter(
    level: str,
) -> None:
    stopped = 0
    for seed in range(10):
        overlap = random_overlap(seed, 2.5e6)
        effort = replace(EFFORTS[level], max_fusions=0)
        found = solve_overlapped(overlap, [], effort, lambda best, bound: None)
        if found.labels is None or found.dual is None:
            continue
        above = replace(effort, cutoff_s=1.001 * found.objective)
        again = solve_overlapped(overlap, [], above, lambda best, bound: None)
        assert again.objective == found.objective and again.bound == found.bound
        below = replace(effort, cutoff_s=1e-3 * found.bound)
        cut = solve_overlapped(overlap, [], below, lambda best, bound: None)
        assert cut.dual is None and cut.bound > below.cutoff_s
        stopped += 1
    assert stopped > 2


def test_the_smallest_peak_is_searched_where_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    overlap = random_overlap(0, 1.0)
    found = solve_overlapped(overlap, [], EFFORTS["fast"], lambda best, bound: None)
    problem, own = overlap.problem, found.smallest_peak
    least = min(map(problem.peak, all_choices(problem)))
    assert found.labels is None and least <= own <= 1.3 * least
    monkeypatch.setattr(solve, "minimum_peak", None)
    assert found.smallest_peak == own
    solve_overlapped(overlap, [], EFFORTS["fast"], lambda best, bound: None)


def test_the_best_prices_of_all_choices_are_the_dual_and_bound_what_fits() -> None:
    for seed in range(10):
        overlap = random_overlap(seed, 2.5e6)
        problem = overlap.problem
        mixture = Mixture(problem.limit)
        for choice in all_choices(problem):
            held = problem.profile(choice) / problem.limit
            mixture.add(overlap.ends_s(choice), held)
        solved = mixture.solve()
        fitting = [c for c in all_choices(problem) if problem.peak(c) <= problem.limit]
        if solved is None:
            assert not fitting
            continue
        value, prices, _ = solved
        priced = overlap.weighted(prices.weight).priced(prices.memory)
        least = min(map(priced.objective, all_choices(problem)))
        assert least - prices.paid(problem.limit) == pytest.approx(value)
        assert value <= min(map(overlap.step_s, fitting), default=math.inf) + 1e-9


def test_the_bound_holds_where_messages_are_cut_short() -> None:
    for seed in range(10):
        overlap = random_overlap(seed, 1.2e6)
        problem = overlap.problem
        fitting = [c for c in all_choices(problem) if problem.peak(c) <= problem.limit]
        best = min(map(overlap.step_s, fitting), default=math.inf)
        effort = Effort(max_rounds=1, deterministic_s=0.0, max_fusions=0)
        found = solve_overlapped(overlap, [], effort, lambda best, bound: None)
        assert found.bound <= best * (1 + 1e-9)
