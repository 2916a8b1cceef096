"""Messages bound what any choice costs; moves on forests never make one worse."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from rhino_jax.solver.bounds.messages import Messages
from rhino_jax.solver.memory import build_memory
from rhino_jax.solver.moves import forests
from rhino_jax.solver.moves.fusion import eliminate
from rhino_jax.solver.moves.moves import Moves
from rhino_jax.solver.parameters import MOVES
from rhino_jax.solver.reduction import Core


TREE = [(0, 1), (1, 2), (1, 3), (3, 4), (3, 5), (5, 6)]
CIRCLES = [*TREE, (0, 2), (2, 4), (4, 6), (0, 6)]
RNG = np.random.default_rng(0)


def moves_of(edges: list[tuple[int, int]], seed: int) -> Moves:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 5, 7).tolist()
    return moves_between(edges, sizes, rng)


def grid_of(side: int, seed: int, sizes: list[int] | None = None) -> Moves:
    nodes = np.arange(side**2).reshape(side, side)
    pairs = [(nodes[:, :-1], nodes[:, 1:]), (nodes[:-1], nodes[1:])]
    edges = [e for a, b in pairs for e in zip(a.flat, b.flat, strict=True)]
    sizes = sizes or [4] * side**2
    return moves_between(edges, sizes, np.random.default_rng(seed))


def moves_between(
    edges: list[tuple[int, int]], sizes: list[int], rng: np.random.Generator
) -> Moves:
    costs = {n: rng.uniform(0, 3, size) for n, size in enumerate(sizes)}
    tables: dict[int, dict[int, np.ndarray]] = {n: {} for n in costs}
    for i, j in edges:
        tables[i][j] = rng.uniform(0, 5, (sizes[i], sizes[j]))
        tables[j][i] = tables[i][j].T
    core = Core(costs, tables, len(costs), np.zeros(()))
    return Moves.of(core, build_memory(core))


def least(moves: Moves) -> float:
    sizes = np.diff(moves.memory.first)
    every = itertools.product(*map(range, sizes))
    return min(moves.objective(np.array(labels)) for labels in every)


@pytest.mark.parametrize("seed", range(5))
def test_on_a_tree_messages_find_the_best_and_prove_it(seed: int) -> None:
    moves = moves_of(TREE, seed)
    messages, choice = Messages(moves), np.zeros(7, dtype=int)
    for _ in range(10):
        messages.sweep(moves.costs, 0)
        bound = messages.sweep(moves.costs, 1, choice)
    assert bound == pytest.approx(least(moves), rel=1e-9)
    assert moves.objective(choice) == pytest.approx(least(moves), rel=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_elimination_finds_the_best_of_all_and_of_some_options(seed: int) -> None:
    moves = moves_of(CIRCLES, seed)
    sizes, best = np.diff(moves.memory.first), np.zeros(7, dtype=int)
    found = eliminate(moves, best, {n: np.arange(size) for n, size in enumerate(sizes)})
    assert found is not None
    assert moves.objective(found) == pytest.approx(least(moves), rel=1e-12)

    some = {n: np.arange(0, sizes[n], 2) for n in (0, 2, 3, 5, 6)}
    found = eliminate(moves, best, some)
    ways = itertools.product(*(some.get(n, [0]) for n in range(7)))
    assert found is not None
    assert moves.objective(found) == pytest.approx(
        min(moves.objective(np.array(labels)) for labels in ways), rel=1e-12
    )


def test_elimination_meets_no_limit_of_dims() -> None:
    """Each of 70 nodes has 69 neighbours, of which all but two have one option."""
    sizes = [1] * 68 + [3, 3]
    moves = moves_between(list(itertools.combinations(range(70), 2)), sizes, RNG)
    every = {n: np.arange(size) for n, size in enumerate(sizes)}
    found = eliminate(moves, np.zeros(70, dtype=int), every)
    assert found is not None
    ways = itertools.product(*every.values())
    assert moves.objective(found) == pytest.approx(
        min(moves.objective(np.array(labels)) for labels in ways), rel=1e-12
    )


def test_elimination_stops_where_its_tables_would_be_too_large() -> None:
    moves = moves_between(list(itertools.combinations(range(9), 2)), [9] * 9, RNG)
    every = {n: np.arange(9) for n in range(9)}
    assert eliminate(moves, np.zeros(9, dtype=int), every) is None


@pytest.mark.parametrize("seed", range(5))
def test_around_circles_messages_rise_to_a_bound(seed: int) -> None:
    moves = moves_of(CIRCLES, seed)
    messages, bounds = Messages(moves), []
    for _ in range(20):
        bounds += [messages.sweep(moves.costs, way) for way in (0, 1)]
    assert max(bounds) <= least(moves) + 1e-9
    assert (np.diff(bounds) > -1e-9).all()
    free = sum(c.min() for c in np.split(moves.costs, moves.memory.first[1:-1]))
    assert bounds[-1] > free


@pytest.mark.parametrize("seed", range(5))
def test_rounds_never_fall_and_bound_every_choice(seed: int) -> None:
    moves = moves_of(CIRCLES, seed)
    messages = Messages(moves)
    bounds = [messages.round(moves.costs) for _ in range(30)]
    assert (np.diff(bounds) > -1e-9).all()
    assert bounds[-1] <= least(moves) + 1e-9
    plain = Messages(moves)
    for _ in range(30):
        plain.sweep(moves.costs, 0)
        bound = plain.sweep(moves.costs, 1)
    assert bounds[-1] > 0.99 * bound


def test_rounds_at_other_costs_bound_those() -> None:
    moves = moves_of(CIRCLES, 1)
    messages = Messages(moves)
    for _ in range(10):
        bound = messages.round(moves.costs)
    cheaper = replace(moves, costs=moves.costs / 8)
    assert least(cheaper) < bound
    assert messages.round(cheaper.costs) <= least(cheaper) + 1e-9


@pytest.mark.parametrize("seed", range(3))
def test_rounds_that_go_on_ahead_rise_faster(seed: int) -> None:
    moves = grid_of(12, seed)
    plain, ahead = Messages(moves), Messages(moves)
    for _ in range(20):
        plain.sweep(moves.costs, 0)
        bound = plain.sweep(moves.costs, 1)
        faster = ahead.round(moves.costs)
    assert faster > bound


@pytest.mark.parametrize("way", [0, 1])
def test_choosing_on_the_way_changes_no_message(way: int) -> None:
    moves = moves_of(CIRCLES, 0)
    plain, choosing = Messages(moves), Messages(moves)
    for _ in range(3):
        bound = plain.sweep(moves.costs, way)
        assert bound == choosing.sweep(moves.costs, way, np.zeros(7, dtype=int))


def test_messages_go_on_at_other_costs() -> None:
    moves = moves_of(CIRCLES, 1)
    before, warm = Messages(moves), Messages(moves)
    for _ in range(20):
        before.sweep(moves.costs, 0)
        best = before.sweep(moves.costs, 1)
    warm.start_from(before.saved, 2.0)
    assert best < warm.sweep(2 * moves.costs, 0) <= 2 * least(moves)
    tree = moves_of(TREE, 1)
    cold, refusing = Messages(tree), Messages(tree)
    refusing.start_from(before.saved, 1.0)
    assert refusing.sweep(tree.costs, 0) == cold.sweep(tree.costs, 0)


@pytest.mark.parametrize("seed", range(5))
def test_a_move_is_never_worse_and_on_a_tree_the_best(seed: int) -> None:
    rng, start = np.random.default_rng(seed), np.zeros(7, dtype=int)
    tree = moves_of(TREE, seed)
    moved = tree.forest_move(tree.costs, start, rng)
    assert tree.objective(moved) == pytest.approx(least(tree), rel=1e-9)
    circles, labels = moves_of(CIRCLES, seed), start
    # Also once all forests are made, and used again.
    for _ in range(2 * MOVES.most_forests):
        moved = circles.forest_move(circles.costs, labels, rng)
        assert circles.objective(moved) <= circles.objective(labels) + 1e-9
        labels = moved
    assert circles.objective(labels) >= least(circles) - 1e-9


@pytest.mark.parametrize("seed", range(5))
def test_moves_at_once_are_those_node_by_node(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = []
    for few, large, most in itertools.product((1, 2, 1000), (6, 1000), (90, 10**6)):
        changed = replace(MOVES, few_nodes=few, large_table=large, most_copied=most)
        monkeypatch.setattr(forests, "MOVES", changed)
        sizes = np.random.default_rng(seed).integers(1, 6, 49).tolist()
        moves = grid_of(7, seed, sizes)
        rng, labels = np.random.default_rng(seed), np.zeros(49, dtype=int)
        for _ in range(3):
            labels = moves.forest_move(moves.costs, labels, rng)
        moved.append(labels)
    assert (np.array(moved) == moved[0]).all()
    assert moves.objective(moved[0]) < moves.objective(np.zeros(49, dtype=int))


def test_repeated_rows_and_columns_change_no_message_and_no_move(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = []
    for cells in (10**6, 1):
        changed = replace(MOVES, distinct_cells=cells, few_nodes=1000)
        monkeypatch.setattr(forests, "MOVES", changed)
        rng = np.random.default_rng(3)
        sizes = rng.integers(4, 9, 25).tolist()
        moves = grid_of(5, 3, sizes)
        for n, around in enumerate(moves.neighbours):
            for m, table in around:
                if n < m:  # Every second row, and every third column, is repeated.
                    table[1::2] = table[0]
                    table[:, 2::3] = table[:, :1]
                    next(t for k, t in moves.neighbours[m] if k == n)[:] = table.T
        messages, labels = Messages(moves), np.zeros(25, dtype=int)
        ways = (0, 1) * 4
        bounds = [messages.sweep(moves.costs, way, labels) for way in ways]
        assert (moves.tables.distinct(0, 1) is None) is (cells > 1)
        moved = moves.forest_move(moves.costs, labels, rng)
        found.append([*bounds, *messages.saved.values, *labels, *moved])
    assert found[0] == pytest.approx(found[1], rel=1e-12)
