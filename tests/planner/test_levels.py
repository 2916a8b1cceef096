"""Level "best" is never worse than "fast", however little its own search finds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import rhino_jax as rhino
from rhino_jax.planner.search import driver
from rhino_jax.planner.search.passes import SOLVE
from rhino_jax.solver.incumbents import EFFORTS, RECIPE_EFFORTS
from tests.cases import covering
from tests.passes.deferred_reductions.cases import cases
from tests.search.zoo import planned


MODELS = [
    "mlp-tiny",
    "rnn-tiny",
    "two-tower-tiny",
    "gpt-tiny",
    "gpt-tiny-unrolled",
    "llama-tiny",
    "moe-tiny",
    "t5-tiny",
    "unet-tiny",
    "wide-resnet-tiny",
    "decode-tiny",
    "mlp-data",
]


@pytest.fixture
def poor_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give level "best" almost no effort of its own."""
    poor = replace(
        EFFORTS["best"],
        max_starts=1,
        max_rounds=0,
        max_fusions=0,
        deterministic_s=0.0,
        max_weights=1,
        max_prices=0,
    )
    monkeypatch.setitem(EFFORTS, "best", poor)
    monkeypatch.setitem(RECIPE_EFFORTS, "best", replace(poor, max_starts=1))


def test_best_starts_from_what_fast_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    solved: list[Any] = []

    class Recorded:
        def run(self, *args: Any) -> Any:
            found = SOLVE.run(*args)
            solved.append((args[2], args[5], found.solution.labels))
            return found

    monkeypatch.setattr(driver, "SOLVE", Recorded())
    planned("mlp-tiny", {"x": 2, "y": 2}, "v5e:2x2", level="best", stages=1)
    (fast, _, found), (best, before, _) = solved[:2]
    assert (fast, best) == (EFFORTS["fast"], EFFORTS["best"])
    assert (before.labels == found).all()


@pytest.mark.usefixtures("poor_search")
@pytest.mark.parametrize("name", covering(MODELS, 0))
def test_best_is_no_worse_than_fast(name: str) -> None:
    options: dict[str, Any] = {"microbatches": "auto", "recompute": "auto", "stages": 1}
    fast, best = (
        planned(
            name, {"x": 2, "y": 2}, "v5e:2x2", level=level, **options
        ).predicted.step_time_s
        for level in ("fast", "best")
    )
    assert best <= fast


@pytest.mark.usefixtures("poor_search")
@pytest.mark.parametrize("name", covering([*cases(4096, 256)]))
def test_reductions_deferred_by_fast_are_deferred_by_best(name: str) -> None:
    case = cases(4096, 256)[name]
    fast, best = (
        rhino.plan(
            case.fn,
            *case.args,
            mesh={"x": 8},
            hardware="h100:8",
            pins=case.pins,
            level=level,
            progress=False,
        )
        for level in ("fast", "best")
    )
    assert best.predicted.step_time_s <= fast.predicted.step_time_s
