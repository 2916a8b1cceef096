"""The solver against trying every choice, on every path that it takes."""

import itertools
import time
from dataclasses import replace

import numpy as np
import pytest

from rhino_jax.contest.command import check, solve_instance
from rhino_jax.contest.instance import parse_instance
from rhino_jax.solver import cpsat, limited
from rhino_jax.solver.bounds.time_prices import price_times
from rhino_jax.solver.cpsat import CpSatLimits
from rhino_jax.solver.limited import Limited
from rhino_jax.solver.memory import build_memory
from rhino_jax.solver.moves.fusion import fuse_moves
from rhino_jax.solver.moves.moves import Moves
from rhino_jax.solver.moves.neighbourhoods import search_kernels
from rhino_jax.solver.moves.repair import repair
from rhino_jax.solver.parameters import CPSAT
from rhino_jax.solver.problem import UnsatisfiedError
from rhino_jax.solver.simplify import simplify
from tests.cases import covering
from tests.contest.instances import best_by_trying, random_instance


def solve(instance, seconds=20.0):
    return solve_instance(instance, deadline=time.monotonic() + seconds, workers=1)


def is_solved_to_the_best(instance):
    best = best_by_trying(instance)
    if best is None:
        with pytest.raises(UnsatisfiedError, match="no choice"):
            solve(instance)
        return
    answer = solve(instance)
    assert answer.checked.fits
    assert answer.checked.objective == best
    assert answer.is_optimal and answer.bound == best


@pytest.mark.parametrize("seed", covering(range(30), 6))
@pytest.mark.parametrize("forbidden", [0.0, 0.2])
def test_small_instances_are_solved_to_the_best(seed, forbidden, short_phases):
    is_solved_to_the_best(random_instance(seed, forbidden=forbidden, tightness=0.3))


@pytest.mark.parametrize("seed", covering(range(8), 1))
def test_without_cpsat_on_the_whole_the_same_is_found(seed, monkeypatch):
    """Prices first, then neighbourhoods, as large networks are solved."""
    monkeypatch.setattr(limited, "MAX_CELLS", -1)
    monkeypatch.setattr(limited, "MAX_PRICED_NODES", -1)
    instance = random_instance(seed, forbidden=0.0, tightness=0.4)
    best = best_by_trying(instance)
    assert best is not None
    answer = solve(instance, seconds=1.5)
    assert answer.checked.objective == best
    assert answer.bound <= best


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("tightness", [0.0, 0.1, 0.3])
def test_prices_per_time_bound_what_fits(seed, tightness):
    """At every price no choice that fits is below the bound, and kernels, which have
    what prices find promising, fit."""
    instance = random_instance(seed, forbidden=0.0, tightness=tightness)
    best = best_by_trying(instance)
    if best is None:
        return
    core = simplify(instance.problem())
    deadline = time.monotonic() + 20
    search = Limited(core, deadline, 1, seed, lambda seconds, value, bound: None)
    if not search.is_priced:
        return
    priced = price_times(search, deadline)
    assert search.bound <= best
    assert (priced.regrets >= 0).all()
    search_kernels(search, priced, deadline)
    assert search.value >= best
    if search.best is None:
        assert tightness < 0.3
    else:
        assert search.memory.excess(search.best) <= 0


@pytest.mark.parametrize("seed", covering(range(12), 4))
def test_memory_rows_that_come_when_needed_change_nothing(
    seed, short_phases, monkeypatch
):
    few = replace(CPSAT, most_amounts=0, rows_at_once=1)
    monkeypatch.setattr(cpsat, "CPSAT", few)
    is_solved_to_the_best(random_instance(seed, forbidden=0.0, tightness=0.2))


@pytest.mark.parametrize("seed", range(12))
def test_two_choices_are_put_together_as_well_as_can_be(seed):
    instance = random_instance(seed, forbidden=0.0, tightness=0.3)
    core = simplify(instance.problem())
    moves = Moves.of(core, build_memory(core))
    rng = np.random.default_rng(seed)
    fitting = []
    while len(fitting) < 2:
        labels = np.array([rng.integers(len(c)) for c in core.costs.values()])
        if (fits := repair(moves, labels)) is not None:
            fitting.append(fits)
    best, other = sorted(fitting, key=moves.objective)
    mixed = [
        labels
        for parts in itertools.product(*zip(best, other, strict=True))
        if moves.memory.excess(labels := np.array(parts)) <= 0
    ]
    fused = fuse_moves(moves, best, [other], CpSatLimits(seconds=10))
    wanted = min(map(moves.objective, mixed))
    if fused is None:
        assert (best == other).all()
    else:
        assert moves.memory.excess(fused) <= 0
        assert moves.objective(fused) == wanted


@pytest.mark.parametrize("seed", range(40))
def test_the_network_keeps_objective_and_memory(seed):
    """Whatever is left to choose, the checker agrees on what it costs and holds."""
    instance = random_instance(seed, forbidden=0.15, nodes=9, edges=12)
    try:
        core = simplify(instance.problem())
        memory = build_memory(core)
    except UnsatisfiedError:
        assert best_by_trying(instance) is None
        return
    assert len(core.costs) <= 9
    moves = Moves.of(core, memory)
    rng = np.random.default_rng(seed)
    for _ in range(20):
        labels = np.array([rng.integers(len(c)) for c in core.costs.values()])
        chosen = {n: int(k) for n, k in zip(core.costs, labels, strict=True)}
        checked = check(instance, core.expand(chosen))
        if checked.forbidden:
            assert moves.objective(labels) >= moves.forbidden
        else:
            assert moves.objective(labels) == checked.objective
        is_within = memory.excess(labels) <= 0
        assert is_within == (checked.peak <= instance.limit)


def test_followers_are_merged(short_phases):
    """A chain whose strategies follow from each other is one node."""
    count = 12
    values = {
        "problem": {
            "name": "chain",
            "nodes": {
                "intervals": [[i, i + 2] for i in range(count)],
                "costs": [[3, 1]] * count,
                "usages": [[1, 2]] * count,
            },
            "edges": {
                "nodes": [[i, i + 1] for i in range(count - 1)],
                "costs": [[0, 10**18, 10**18, 5]] * (count - 1),
            },
            "usage_limit": 4,
        }
    }
    instance = parse_instance(values)
    assert len(simplify(instance.problem()).costs) == 1
    answer = solve(instance)
    assert answer.choices == [0] * count
    assert answer.checked.objective == 3 * count


def test_memory_that_nothing_fits_is_said():
    instance = random_instance(3, forbidden=0.0, tightness=-0.2)
    with pytest.raises(UnsatisfiedError, match="memory limit") as raised:
        solve(instance)
    assert "raise the limit" in str(raised.value)
