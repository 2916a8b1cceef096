"""The solver against enumeration, on random problems and on small programs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rhino_jax.hardware.files import load_target
from rhino_jax.hardware.target import Target
from rhino_jax.solver.incumbents import Effort
from rhino_jax.solver.problem import EdgeUsage, NodeUsage, PairTable, Problem
from rhino_jax.solver.reduction import reduce
from rhino_jax.solver.solve import solve
from tests.search.brute_force import (
    best_by_enumeration,
    model_of,
    peaks,
    recomputed_objective_s,
)


def random_problem(seed: int, limit: float) -> Problem:
    rng = np.random.default_rng(seed)
    count = int(rng.integers(2, 8))
    sizes = [int(rng.integers(1, 5)) for _ in range(count)]
    edges = [
        PairTable(i, j, rng.random((sizes[i], sizes[j])) * 2)
        for i in range(count)
        for j in range(i + 1, count)
        if rng.random() < 0.6
    ]
    usages = []
    for i in range(count):
        start = int(rng.integers(0, 5))
        stop = start + int(rng.integers(1, 4))
        usages.append(NodeUsage(i, rng.random(sizes[i]) * 1e6, start, stop))
    pairs = [
        EdgeUsage(e.source, e.target, rng.random(e.table.shape) * 1e6, 3, 5)
        for e in edges[:2]
    ]
    return Problem([rng.random(k) for k in sizes], edges, usages, pairs, limit, 10)


@pytest.mark.parametrize("limit", [np.inf, 2e6, 1.2e6])
@pytest.mark.parametrize("seed", range(12))
def test_random_problems_are_solved_to_optimality(seed: int, limit: float) -> None:
    problem = random_problem(seed, limit)
    best = best_by_enumeration(problem)
    found = solve(problem, [], Effort())
    if np.isinf(best):
        assert found.labels is None
        return
    assert found.labels is not None
    assert problem.peak(found.labels) <= limit
    assert found.objective == pytest.approx(problem.objective(found.labels))
    assert found.objective == pytest.approx(best, rel=1e-4)
    assert found.bound <= best * (1 + 1e-9)


def test_reduction_keeps_the_optimum_and_the_way_back() -> None:
    for seed in range(20):
        problem = random_problem(seed, np.inf)
        core = reduce(problem)
        labels = core.expand({i: 0 for i in core.costs})
        left = core.constant + sum(c[0] for c in core.costs.values())
        left += sum(
            t[0, 0] for i, near in core.tables.items() for j, t in near.items() if i < j
        )
        assert problem.objective(labels) == pytest.approx(left)
        if not core.costs:
            assert problem.objective(labels) == pytest.approx(
                best_by_enumeration(problem)
            )
        assert all(len(around) > 2 for around in core.tables.values())


@pytest.mark.parametrize("seed", range(6))
def test_reduction_tells_shared_arrays_apart_by_where_they_stand(seed: int) -> None:
    # A comb of teeth that are alike, one of them read the other way round.
    rng = np.random.default_rng(seed)
    cost, own, table = rng.random(3), rng.random(3), rng.random((3, 3))
    size = 4
    costs = [cost] * size + [own] * size
    edges = [PairTable(i, i + 1, table) for i in range(size - 1)]
    edges += [PairTable(i, size + i, table) for i in range(size - 1)]
    edges += [PairTable(2 * size - 1, size - 1, table), PairTable(0, 1, table)]
    problem = Problem(costs, edges)
    core = reduce(problem)
    assert not core.costs
    found = problem.objective(core.expand({}))
    assert found == pytest.approx(best_by_enumeration(problem))
    # One table is turned round once.
    removed = {step.node: step.tables for step in core.steps}
    assert removed[size][0] is removed[size + 1][1]


def test_the_bound_holds_where_the_search_is_cut_short() -> None:
    for seed in range(12):
        problem = random_problem(seed, np.inf)
        short = solve(problem, [], Effort(max_rounds=1, deterministic_s=0.0))
        best = best_by_enumeration(problem)
        assert short.bound <= best + 1e-9 <= short.objective + 2e-9


def test_a_start_that_fits_is_never_made_worse() -> None:
    problem = random_problem(3, 3e6)
    rng = np.random.default_rng(0)
    starts = [
        np.array([rng.integers(len(c)) for c in problem.costs]) for _ in range(30)
    ]
    fitting = [s for s in starts if problem.peak(s) <= problem.limit]
    assert fitting
    found = solve(problem, starts, Effort(max_rounds=1, deterministic_s=0.0))
    assert found.objective <= min(problem.objective(s) for s in fitting)


def two_layers(w1: jax.Array, w2: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ w1) @ w2


def loss(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.sum((x @ w) ** 2)


def lookup(table: jax.Array, ids: jax.Array, w: jax.Array) -> jax.Array:
    return table[ids] @ w


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


PROGRAMS = {
    "two_layers": (two_layers, (f32(8, 16), f32(16, 8), f32(4, 8))),
    "wide": (two_layers, (f32(512, 2048), f32(2048, 512), f32(16, 512))),
    "tall": (two_layers, (f32(32, 64), f32(64, 32), f32(4096, 32))),
    "gradient": (jax.grad(loss), (f32(256, 256), f32(8, 256))),
    "lookup": (
        lookup,
        (f32(4096, 64), jax.ShapeDtypeStruct((32,), jnp.int32), f32(64, 64)),
    ),
}
TARGETS = {
    "slow links": Target.pure_communication({"x": (1e-6, 1e9)}),
    "h100": load_target("h100"),
    "v5e": load_target("v5e"),
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", PROGRAMS)
def test_small_programs_equal_brute_force(name: str, size: int, target: str) -> None:
    fn, args = PROGRAMS[name]
    model = model_of(fn, args, {"x": size}, TARGETS[target])
    found = solve(model.problem, [], Effort())
    assert found.labels is not None
    assert found.objective == pytest.approx(best_by_enumeration(model.problem))
    assert found.objective == pytest.approx(
        recomputed_objective_s(model, found.labels, TARGETS[target])
    )


def test_a_tight_budget_equals_brute_force() -> None:
    fn, args = PROGRAMS["gradient"]
    free = model_of(fn, args, {"x": 4}, TARGETS["h100"])
    found = solve(free.problem, [], Effort())
    assert found.labels is not None
    least = float(peaks(free.problem).min())
    for share in (0.95, 0.6, 0.3):
        limit = least + share * (free.problem.peak(found.labels) - least)
        model = model_of(fn, args, {"x": 4}, TARGETS["h100"], limit)
        tight = solve(model.problem, [], Effort())
        assert tight.objective == pytest.approx(best_by_enumeration(model.problem))
        assert tight.peak <= limit
