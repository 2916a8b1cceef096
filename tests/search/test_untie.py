"""Repeats choose differently where memory binds, and no smaller budget is faster."""

from __future__ import annotations

import pytest

import rhino_jax as rhino
from rhino_jax.models import registry


@pytest.fixture(scope="module")
def sweep() -> list[rhino.Plan]:
    """Plans of a GPT of layers that repeat, under smaller and smaller budgets."""
    work = registry.get("gpt-tiny-unrolled", num_layers=4)
    plans: list[rhino.Plan] = []
    for share in (None, 0.65, 0.5):
        budget = share and int(share * plans[0].predicted.peak_bytes)
        plans.append(
            rhino.plan(
                work.step,
                *work.abstract_args(),
                mesh={"data": 4, "model": 4},
                hardware="v5e:4x4",
                donate_argnums=work.donate_argnums,
                memory_budget_bytes=budget or 2**34,
                progress=False,
            )
        )
    return plans


def test_a_smaller_budget_never_takes_less_time(sweep: list[rhino.Plan]) -> None:
    times = [p.search.objective_s for p in sweep]
    assert times == sorted(times)
    assert times[0] < times[-1]


def test_plans_under_a_budget_fit_it_and_are_near_their_bounds(
    sweep: list[rhino.Plan],
) -> None:
    for plan in sweep:
        assert plan.predicted.peak_bytes <= plan.memory_budget_bytes
        assert plan.search.bound_s <= plan.search.objective_s
        assert plan.search.gap <= 0.04
