"""Collectives hide behind compute once, and the search knows it."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rhino_jax.hardware.files import load_target
from rhino_jax.models import registry
from rhino_jax.solver import solve as solve_module
from rhino_jax.solver.incumbents import EFFORTS, Effort
from rhino_jax.solver.overlap import Overlap, Slack, Wait
from rhino_jax.solver.parameters import WEIGHTS
from rhino_jax.solver.problem import PairTable, Problem
from rhino_jax.solver.solve import solve_overlapped
from tests.search.brute_force import model_of, objectives
from tests.search.zoo import planned


def two_layers(w1: jax.Array, w2: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ w1) @ w2


def shapes(batch: int, width: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    sizes = ((width, 4 * width), (4 * width, width), (batch, width))
    return tuple(jax.ShapeDtypeStruct(s, jnp.float32) for s in sizes)


@pytest.mark.parametrize(
    ("share", "hidable_share"), [(0.1, 0.8), (0.5, 0.4), (1.0, 0.8)]
)
@pytest.mark.parametrize(("batch", "width"), [(4096, 512), (512, 2048), (64, 1024)])
def test_small_programs_are_bounded_and_near_brute_force(
    batch: int, width: int, share: float, hidable_share: float
) -> None:
    """Equal in most; between two weights a choice may be missed (the worst here is
    7.4 % above the optimum), and the bound then leaves a gap."""
    target = load_target("h100")
    model = model_of(two_layers, shapes(batch, width), {"x": 4}, target)
    nodes, edges = len(model.problem.costs), len(model.problem.edges)
    slack = Slack((Wait.LATER,) * nodes, (Wait.LATER,) * edges)
    overlap = Overlap.of(
        model.problem,
        model.compute_costs(),
        slack,
        share=share,
        shares={Wait.LATER: hidable_share},
    )
    total = objectives(model.problem.costs, model.problem.edges)
    compute = objectives(overlap.compute.costs, [])
    hidden = np.minimum(hidable_share * (total - compute), share * compute)
    best = float((total - hidden).min())
    found = solve_overlapped(overlap, [], Effort(), lambda best, bound: None)
    assert found.labels is not None
    assert found.objective == pytest.approx(overlap.step_s(found.labels))
    assert found.bound <= best * (1 + 1e-9)
    assert best * (1 - 1e-9) <= found.objective <= 1.08 * best
    if found.bound == pytest.approx(found.objective):
        assert found.objective == pytest.approx(best)


@pytest.mark.slow
def test_more_overlap_never_costs_and_hides_at_most_the_budget() -> None:
    work = registry.get("gpt-medium", num_layers=2, batch=8)
    times = []
    for share in (0.0, 0.2, 0.6):
        target = load_target("h100").replace(overlap_share=share)
        plan = planned(work, {"x": 8}, target)
        moved_s = sum(c.seconds for c in plan.collectives)
        hidden_s = moved_s - plan.predicted.communication_s
        assert 0 <= hidden_s + 1e-12
        assert hidden_s <= share * plan.predicted.compute_s + 1e-9
        assert plan.search.bound_s <= plan.predicted.step_time_s * (1 + 1e-9)
        fitting = [r.step_time_s for r in plan.recipes.values() if r is not None]
        assert plan.predicted.step_time_s <= min(fitting) * (1 + 1e-9)
        times.append(plan.predicted.step_time_s)
    assert times[0] > times[1] > times[2]


def test_reductions_that_are_awaited_hide_behind_nothing() -> None:
    def costs(awaits_sums: bool) -> tuple[float, float]:
        target = load_target("v5e:2x4").replace(awaits_sums=awaits_sums)
        plan = planned("gpt-tiny-unrolled", {"x": 8}, target).recipe("dp")
        sums_s = sum(c.count * c.seconds for c in plan.collectives)
        return plan.predicted.communication_s, sums_s

    exposed_s, sums_s = costs(True)
    assert exposed_s == pytest.approx(sums_s)
    exposed_s, sums_s = costs(False)
    assert exposed_s < 0.9 * sums_s


def test_where_nothing_can_hide_the_search_is_not_brief(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(solve_module, "WEIGHTS", replace(WEIGHTS, briefly_near=0.9))
    target = load_target("v5e:4x4").replace(hidable_share=0.0)
    plan = planned("gpt-tiny-unrolled", {"x": 4, "y": 4}, target)
    assert plan.search.gap <= 1.2 * EFFORTS["best"].near


def two_choices(first: tuple[float, ...], second: tuple[float, ...]) -> Overlap:
    """Two choices in all, of each its compute, what can hide and what cannot."""
    compute, hidable, exposed = np.array([first, second]).T
    apart = 1e3 * (1 - np.eye(2))
    problem = Problem([compute + hidable, exposed], [PairTable(0, 1, apart)])
    slack = Slack((Wait.LATER, Wait.NONE), (Wait.NONE,))
    return Overlap.of(
        problem, [compute, np.zeros(2)], slack, share=0.5, shares={Wait.LATER: 1.0}
    )


@pytest.mark.parametrize(
    ("first", "second", "bound"),
    [
        # All hides in the first, and too much in the second: 224 - 77.5 w and
        # 221 + 51.5 w cross at 3/129.
        ((167.0, 6.0, 57.0), (83.0, 93.0, 138.0), 221 + 51.5 * 3 / 129),
        # The second hides all too.
        ((167.0, 6.0, 57.0), (83.0, 41.0, 138.0), 221.0),
        # Neither does: 224 + 16.5 w is less everywhere.
        ((167.0, 100.0, 57.0), (83.0, 93.0, 145.0), 240.5),
    ],
)
def test_the_bound_is_the_top_of_what_weights_give(
    first: tuple[float, ...], second: tuple[float, ...], bound: float
) -> None:
    overlap = two_choices(first, second)
    found = solve_overlapped(overlap, [], Effort(), lambda best, bound: None)
    ends = [overlap.step_s(np.array([k, k])) for k in (0, 1)]
    assert found.objective == pytest.approx(min(ends))
    assert found.bound == pytest.approx(bound, rel=1e-3)
    assert found.bound <= bound * (1 + 1e-9)
