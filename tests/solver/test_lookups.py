"""Sums over flat arrays against sums over the tables themselves."""

from __future__ import annotations

import numpy as np
import pytest

from rhino_jax.solver.memory import build_memory
from rhino_jax.solver.moves.moves import Moves
from rhino_jax.solver.problem import NodeUsage, PairTable, Problem
from rhino_jax.solver.reduction import core_of
from rhino_jax.utils.cache import Memo
from tests.solver.test_engine import random_problem


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


@pytest.mark.parametrize("seed", range(4))
def test_restricted_problems_keep_costs_and_memory(seed: int) -> None:
    problem, rng = random_problem(seed, 5e5), np.random.default_rng(seed)
    allowed = [np.flatnonzero(rng.random(len(c)) < 0.6) for c in problem.costs]
    allowed = [
        a if len(a) else np.array([len(c) - 1])
        for a, c in zip(allowed, problem.costs, strict=True)
    ]
    core = core_of(problem, Memo(), allowed)
    assert core.limit == problem.limit
    every = [[int(rng.integers(len(a))) for a in allowed] for _ in range(10)]
    in_whole = [[int(a[k]) for a, k in zip(allowed, x, strict=True)] for x in every]
    core.limit = problem.peak(in_whole[0])
    moves = Moves.of(core, build_memory(core))
    for chosen, same in zip(every, in_whole, strict=True):
        cost = moves.objective(np.array(chosen))
        assert cost == pytest.approx(problem.objective(same))
        held = np.zeros(problem.end)
        for u in core.usages:
            amount = u.usage[tuple(chosen[i] for i in u.nodes[: u.usage.ndim])]
            held[u.start : u.stop] += amount
        np.testing.assert_allclose(held, problem.profile(same), atol=1e-6)
        over = max(problem.peak(same) - core.limit, 0.0)
        excess = moves.memory.excess(np.array(chosen))
        assert excess == pytest.approx(over, abs=1e-6)
        assert core.expand(dict(enumerate(chosen))).tolist() == same


def test_one_table_is_scaled_once() -> None:
    memo, table = Memo(), np.arange(6.0).reshape(2, 3)
    assert memo.scaled(table, 3.0) is memo.scaled(table, 3.0)
    assert (memo.scaled(table, 3.0) == 3 * table).all()
    assert (memo.scaled(table, 2.0) == 2 * table).all()


def test_a_table_turned_round_twice_is_itself() -> None:
    memo, table = Memo(), np.arange(6.0).reshape(2, 3)
    other = memo.transposed(table)
    assert (other == table.T).all() and memo.transposed(table) is other
    assert memo.transposed(other) is table


def test_a_problem_without_nodes_costs_nothing() -> None:
    empty = Problem([], [])
    assert empty.objective([]) == 0 and empty.peak([]) == 0


@pytest.mark.parametrize("seed", range(6))
def test_every_option_is_charged_beside_the_other_choices(seed: int) -> None:
    problem, rng = random_problem(seed, np.inf), np.random.default_rng(seed)
    sizes = [len(c) for c in problem.costs]
    # One node that is joined to itself, and two edges between the same two.
    problem.edges.append(PairTable(0, 0, rng.random((sizes[0], sizes[0]))))
    problem.edges.append(PairTable(1, 0, rng.random((sizes[1], sizes[0]))))
    problem.edges.append(PairTable(1, 0, problem.edges[-1].table))
    labels = np.array([rng.integers(n) for n in sizes])
    beside, base = problem.beside(), problem.objective(labels)
    own = beside.own()
    every = own + beside.pairs(labels)
    for node, size in enumerate(sizes):
        mine = every[beside.first[node] : beside.first[node + 1]]
        assert beside.one(node, own, labels) == pytest.approx(mine)
        for option in range(size):
            other = labels.copy()
            other[node] = option
            change = mine[option] - mine[labels[node]]
            assert problem.objective(other) - base == pytest.approx(change)
