"""A time limit binds recipes, meshes and search alike, and is told where it cut."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import rhino_jax as rhino
from rhino_jax.plan.plan import PlanData, is_cut_by_clock
from rhino_jax.plan.records import CUT_BY_CLOCK
from rhino_jax.planner.search import folding
from rhino_jax.solver import restricted
from tests.plan.samples import sample_plan


def deep(w: Any, x: Any) -> Any:
    for i in range(3):
        x = jnp.tanh(x @ w[f"a{i}"]) @ w[f"b{i}"]
    return (x**2).mean()


def step(w: Any, x: Any) -> Any:
    return jax.tree.map(lambda p, g: p - g, w, jax.grad(deep)(w, x))


def shapes() -> Any:
    w = {f"{k}{i}": jnp.float32 for k in "ab" for i in range(3)}
    of = {"a": (256, 1024), "b": (1024, 256)}
    return (
        {k: jax.ShapeDtypeStruct(of[k[0]], dtype) for k, dtype in w.items()},
        jax.ShapeDtypeStruct((512, 256), jnp.float32),
    )


def planned(**options: Any) -> PlanData:
    mesh = options.pop("mesh", {"data": 4, "model": 4})
    return rhino.plan(step, *shapes(), mesh=mesh, hardware="v5e:4x4", **options)


def clock(monkeypatch: pytest.MonkeyPatch, over_at: str, module: Any) -> None:
    """The time is over as soon as this function is entered."""
    inner, real, offset = getattr(module, over_at), time.monotonic, [0.0]

    def late(*args: Any, **kwargs: Any) -> Any:
        offset[0] = 1e6
        return inner(*args, **kwargs)

    monkeypatch.setattr(module, over_at, late)
    monkeypatch.setattr(time, "monotonic", lambda: real() + offset[0])


def test_nothing_is_searched_when_the_time_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither recipes nor the rest: building the model is all that cannot stop."""

    def searched(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("searched")

    monkeypatch.setattr(restricted, "solve_reduced", searched)
    monkeypatch.setattr(restricted, "_reduced", searched)
    monkeypatch.setattr(folding, "solve_mesh_problem", searched)
    plan = planned(time_limit_s=1e-6)
    assert plan.search.status == "recipe"
    assert is_cut_by_clock(plan)
    assert plan.recipes["dp"] is not None
    best = min(r.step_time_s for r in plan.recipes.values() if r is not None)
    assert plan.predicted.step_time_s == pytest.approx(best)


@pytest.mark.parametrize(
    ("over_at", "module"),
    [
        ("cheapest_restricted", folding),
        ("solve_reduced", restricted),
        ("solve_mesh_problem", folding),
    ],
)
def test_it_is_told_where_the_time_was_over_on_the_way(
    monkeypatch: pytest.MonkeyPatch, over_at: str, module: Any
) -> None:
    clock(monkeypatch, over_at, module)
    plan = planned(time_limit_s=1e5)
    assert is_cut_by_clock(plan)
    assert plan.predicted.peak_bytes <= plan.memory_budget_bytes


def test_without_a_cut_nothing_is_told() -> None:
    plan = planned(time_limit_s=1e5)
    assert not is_cut_by_clock(plan)
    assert plan.notes == planned().notes


def test_meshes_that_there_was_no_time_for_are_told() -> None:
    plan = planned(mesh=None, time_limit_s=1e-6)
    assert any("before mesh shapes were compared" in n for n in plan.notes)
    assert len(plan.meshes) == 1


def test_a_plan_in_no_time_still_fits() -> None:
    """Even where no recipe does."""
    free = planned()
    least = min(r.peak_bytes for r in free.recipes.values() if r is not None)
    budget = int(0.98 * least)
    plan = planned(time_limit_s=1e-6, memory_budget_bytes=budget)
    assert plan.predicted.peak_bytes <= budget
    assert is_cut_by_clock(plan)


def test_nothing_is_compiled_when_the_time_is_over() -> None:
    axes = {"data": 4, "model": 2}
    plan = rhino.plan(
        step, *shapes(), mesh=axes, hardware="cpu", refine=3, time_limit_s=1e-6
    )
    assert plan.refined == ()
    assert any("0 of" in n and n.startswith(CUT_BY_CLOCK) for n in plan.notes)


def test_what_the_clock_cut_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RHINO_CACHE", "1")
    monkeypatch.setenv("RHINO_CACHE_DIR", str(tmp_path))
    planned(time_limit_s=1e-6)
    assert not list(tmp_path.iterdir())
    planned(time_limit_s=1e5)
    assert planned(time_limit_s=1e5).cached


def test_the_note_is_what_is_looked_for() -> None:
    plan = sample_plan()
    assert not is_cut_by_clock(plan)
    assert is_cut_by_clock(replace(plan, notes=(f"{CUT_BY_CLOCK} was over.",)))
