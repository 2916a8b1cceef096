"""Several restrictions of one problem, minimised together."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from rhino_jax.solver import restricted
from rhino_jax.solver.incumbents import EFFORTS, RECIPE_EFFORTS, Effort
from rhino_jax.solver.pairwise import PairwiseSolution, solve_reduced
from rhino_jax.solver.parameters import PRESOLVE
from rhino_jax.solver.problem import Labels, PairTable, Problem
from rhino_jax.solver.reduction import Core
from rhino_jax.solver.restricted import Restrictions
from tests.search.brute_force import best_by_enumeration
from tests.solver.test_engine import random_problem


def random_restrictions(
    seed: int, kinds: np.ndarray, sizes: list[int], share: float
) -> tuple[Restrictions, np.ndarray]:
    """Four of them, and what they permit: [restrictions, options of all kinds]."""
    rng = np.random.default_rng(seed)
    first = np.cumsum(sizes) - sizes
    permitted = rng.random((4, sum(sizes))) < share
    permitted[:, first + rng.integers(np.array(sizes))] = True
    return Restrictions.of(permitted, first, kinds), permitted


@pytest.mark.parametrize("seed", range(4))
def test_restrictions_turn_choices_there_and_back(seed: int) -> None:
    sizes, kinds = [3, 1, 5], np.array([2, 0, 0, 1, 2])
    left, permitted = random_restrictions(seed, kinds, sizes, 0.5)
    for row in range(4):
        every = [
            np.flatnonzero(permitted[row, left.first[k] : left.first[k] + sizes[k]])
            for k in kinds
        ]
        for node, options in enumerate(every):
            places = left.options[node][row]
            assert places[: len(options)].tolist() == options.tolist()
            assert (places[len(options) :] == options[-1]).all(), "the last is repeated"
        for choice in itertools.product(*(range(len(o)) for o in every)):
            whole = left.expand(row, np.array(choice))
            assert whole.tolist() == [o[k] for o, k in zip(every, choice, strict=True)]
            assert left.contract(row, whole).tolist() == list(choice)
        gone = [
            sorted({*range(sizes[k])} - {*o.tolist()})
            for k, o in zip(kinds, every, strict=True)
        ]
        for node, options in enumerate(gone):
            for option in options:
                whole = left.expand(row, np.zeros(len(kinds), np.int64))
                whole[node] = option
                assert left.contract(row, whole)[node] == -1
    assert left.options[0] is left.options[4], "nodes of a kind share an array"


@pytest.mark.parametrize("most_at_once", [0, 60, PRESOLVE.most_at_once])
@pytest.mark.parametrize("seed", range(8))
def test_every_restriction_gets_its_cheapest(
    seed: int, most_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once = replace(PRESOLVE, most_at_once=most_at_once)
    monkeypatch.setattr(restricted, "PRESOLVE", at_once)
    problem = random_problem(seed, np.inf)
    sizes = [len(c) for c in problem.costs]
    kinds = np.arange(len(sizes))
    left, permitted = random_restrictions(seed, kinds, sizes, 0.6)
    starts = np.zeros((4, len(sizes)), np.int64)
    found = restricted.cheapest_restricted(problem, left, starts, EFFORTS["best"])
    for row, labels in enumerate(found):
        assert (left.contract(row, labels) >= 0).all()
        forbidden = np.split(np.where(permitted[row], 0.0, np.inf), left.first[1:])
        costs = [c + f for c, f in zip(problem.costs, forbidden, strict=True)]
        best = best_by_enumeration(problem.recharged(costs, problem.edges))
        assert problem.objective(labels) == pytest.approx(best)


def test_one_that_allows_more_is_never_dearer() -> None:
    for seed in range(12):
        problem = random_problem(seed, np.inf)
        sizes = [len(c) for c in problem.costs]
        left, permitted = random_restrictions(seed, np.arange(len(sizes)), sizes, 0.4)
        permitted = np.logical_or.accumulate(permitted)
        left = Restrictions.of(permitted, left.first, left.kinds)
        starts = np.zeros((4, len(sizes)), np.int64)
        found = restricted.cheapest_restricted(
            problem, left, starts, RECIPE_EFFORTS["fast"], math.inf
        )
        costs = [problem.objective(labels) for labels in found]
        assert all(a >= b - 1e-9 for a, b in itertools.pairwise(costs))


def test_what_another_found_is_taken_over_where_it_keeps_to_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where the first search finds nothing better than its start."""
    calls: list[int] = []

    def solve(core: Core, starts: list[Labels], effort: Effort) -> PairwiseSolution:
        calls.append(len(starts))
        if len(calls) == 1:
            return PairwiseSolution(starts[0], np.inf, 0.0, 0, len(core.costs))
        return solve_reduced(core, starts, effort)

    monkeypatch.setattr(restricted, "solve_reduced", solve)
    rng, size = np.random.default_rng(0), 6
    edges = [PairTable(i, j, rng.random((3, 3))) for i in range(size) for j in range(i)]
    problem = Problem([rng.random(3) for _ in range(size)], edges)
    permitted = np.ones((2, 3 * size), bool)
    left = Restrictions.of(permitted, 3 * np.arange(size), np.arange(size))
    starts = np.zeros((2, size), np.int64)
    first, second = restricted.cheapest_restricted(
        problem, left, starts, EFFORTS["best"]
    )
    assert len(calls) == 2
    assert problem.objective(second) < problem.objective(starts[0])
    assert (first == second).all()
