"""Sums over flat arrays against sums over the tables themselves."""

from __future__ import annotations

import numpy as np
import pytest

from rhino_jax.search.problem import NodeUsage, PairTable, Problem, Scaled
from tests.search.test_engine import random_problem


@pytest.mark.parametrize("seed", range(6))
def test_a_choice_costs_and_holds_what_its_tables_say(seed: int) -> None:
    problem = random_problem(seed, np.inf)
    problem.edges.append(PairTable(1, 1, np.diag(np.arange(len(problem.costs[1])) + 1)))
    rng = np.random.default_rng(seed)
    labels = [int(rng.integers(len(c))) for c in problem.costs]
    cost = sum(c[k] for c, k in zip(problem.costs, labels, strict=True))
    cost += sum(e.table[labels[e.source], labels[e.target]] for e in problem.edges)
    assert problem.objective(labels) == pytest.approx(cost)
    held = np.zeros(problem.end)
    for use in problem.node_usages:
        held[use.start : use.stop] += use.usage[labels[use.node]]
    for pair in problem.edge_usages:
        amount = pair.usage[labels[pair.source], labels[pair.target]]
        held[pair.start : pair.stop] += amount
    np.testing.assert_allclose(problem.profile(labels), held, atol=1e-6)
    assert problem.peak(labels) == pytest.approx(held.max())


@pytest.mark.parametrize("seed", range(6))
def test_priced_memory_is_charged_while_it_is_held(seed: int) -> None:
    problem = random_problem(seed, np.inf)
    # The same array twice is charged twice.
    use = problem.node_usages[0]
    problem.node_usages.append(NodeUsage(use.node, use.usage, 0, problem.end))
    prices = {2: 1e-6, 4: 3e-6, 7: 2e-6}
    priced = problem.priced(prices)
    rng = np.random.default_rng(seed)
    for _ in range(5):
        labels = [int(rng.integers(len(c))) for c in problem.costs]
        profile = problem.profile(labels)
        extra = sum(price * profile[time] for time, price in prices.items())
        expected = problem.objective(labels) + extra
        assert priced.objective(labels) == pytest.approx(expected)


def test_restricted_problems_keep_costs_and_memory() -> None:
    problem = random_problem(3, 5e5)
    allowed = [np.array([len(c) - 1]) for c in problem.costs]
    small = problem.restricted(allowed)
    last = [len(c) - 1 for c in problem.costs]
    none = [0] * len(last)
    assert small.objective(none) == pytest.approx(problem.objective(last))
    assert small.peak(none) == pytest.approx(problem.peak(last))
    assert small.limit == problem.limit
    bare = problem.restricted(allowed, keeps_memory=False)
    assert bare.peak(none) == 0 and np.isinf(bare.limit)
    assert bare.objective(none) == small.objective(none)


def test_one_table_is_scaled_once() -> None:
    scaled, table = Scaled(3.0), np.arange(6.0).reshape(2, 3)
    assert scaled.table(table) is scaled.table(table)
    assert (scaled.table(table) == 3 * table).all()


def test_a_problem_without_nodes_costs_nothing() -> None:
    empty = Problem([], [])
    assert empty.objective([]) == 0 and empty.peak([]) == 0
