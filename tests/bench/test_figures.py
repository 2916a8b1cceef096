from __future__ import annotations

import math
from statistics import geometric_mean

import pytest

from rhino_jax.bench.tables.figures import (
    fidelity_of,
    figures_of,
    relative_error,
    spearman,
)
from tests.bench.samples import measure, result


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([1, 2, 3], [10, 20, 30], 1.0),
        ([1, 2, 3], [9, 4, 1], -1.0),
        # d = (0, 1, 1, 0): 1 - 6 * 2 / (4 * 15)
        ([1, 2, 3, 4], [1, 3, 2, 4], 0.8),
        # Ranks 1, 2.5, 2.5, 4 against 1, 2, 3, 4: sqrt(0.9).
        ([1, 5, 5, 9], [1, 2, 3, 4], math.sqrt(0.9)),
    ],
)
def test_spearman(a: list[float], b: list[float], expected: float) -> None:
    assert spearman(a, b) == pytest.approx(expected)


def test_spearman_of_nothing_to_rank() -> None:
    assert spearman([1, 2], [1, 2]) is None
    assert spearman([1, 2, 3], [5, 5, 5]) is None


def test_relative_error() -> None:
    assert relative_error(90, 100) == pytest.approx(0.1)
    assert relative_error(0, 0) == 0
    assert relative_error(5, 0) == math.inf


def test_fidelity_counts_every_program_once_and_only_those_that_fit() -> None:
    results = [
        result("fast", 10, predicted_ms=9, program="p"),
        result("best", 10, predicted_ms=5, program="p"),
        result("fsdp", 20, predicted=measure(20, wire_mb=1.5, peak_mib=0.5)),
        result("dp", None, status="out of memory"),
        result("zero1", 40, predicted_ms=40),
    ]
    found = fidelity_of(results)
    assert found.programs == 3
    assert found.wire.median == 0 and found.wire.worst == pytest.approx(0.5)
    assert found.wire.worst_cell == "model-a on v5e:4x4, fsdp"
    assert found.peak.worst == pytest.approx(0.5)
    assert found.step.worst == pytest.approx(0.1)
    assert found.unpredicted == {"v5e:4x4": pytest.approx(0.5)}
    assert found.rank_correlation == {"v5e:4x4": pytest.approx(1.0)}


def test_ranks_are_compared_within_a_target() -> None:
    here = [result(m, t, predicted_ms=p) for m, t, p in
            (("dp", 1, 2), ("fsdp", 2, 3), ("best", 3, 4))]  # fmt: skip
    there = [result(m, t, predicted_ms=p, row="b", target="h100:8") for m, t, p in
             (("dp", 100, 9), ("fsdp", 200, 8), ("best", 300, 7))]  # fmt: skip
    found = fidelity_of([*here, *there]).rank_correlation
    assert found == {"v5e:4x4": pytest.approx(1), "h100:8": pytest.approx(-1)}


def test_quality_is_over_the_best_recipe_that_fits() -> None:
    results = [
        result("dp", 5, status="out of memory"),
        result("fsdp", 10),
        result("zero1", 20),
        result("fast", 12),
        result("best", 9),
        result("dp", 10, row="b", regime="little"),
        result("best", 4, row="b", regime="little"),
        result("dp", 10, row="c", regime="little"),
        result("best", 9, row="c", regime="little"),
    ]
    figures = figures_of(results)
    assert [(q.method, q.recipe, q.ratio) for q in figures.quality] == [
        ("fast", "fsdp", pytest.approx(1.2)),
        ("best", "fsdp", pytest.approx(0.9)),
        ("best", "dp", pytest.approx(0.4)),
        ("best", "dp", pytest.approx(0.9)),
    ]
    assert {m: max(found) for m, found in figures.ratios().items()} == {
        "fast": pytest.approx(1.2),
        "best": pytest.approx(0.9),
    }
    little = figures.ratios("little")
    assert {m: geometric_mean(x) for m, x in little.items()} == {
        "best": pytest.approx(0.6)
    }


def test_who_fits() -> None:
    results = [
        result("dp", None, status="out of memory", row="a"),
        result("megatron", None, status="not allowed", row="a"),
        result("best", 3, row="a"),
        result("dp", 3, row="b"),
        result("best", None, status="no plan", row="b"),
        # A recipe that could not be compiled may well have fitted.
        result("dp", None, status="timeout", row="c"),
        result("best", 3, row="c"),
        # And where there is no recipe, nothing is shown.
        result("best", 3, row="d"),
    ]
    figures = figures_of(results)
    assert figures.only_rhino_fits == ("model-a (plenty) on v5e:4x4: best",)
    assert figures.only_recipes_fit == ("model-b (plenty) on v5e:4x4: best",)
    assert figures.failed == 1


def test_rematerialised_values_are_counted_once_a_program() -> None:
    results = [
        result("fast", 1, rematerialised=2, program="p"),
        result("best", 1, rematerialised=2, program="p"),
        result("fsdp", 1, rematerialised=5),
    ]
    figures = figures_of(results)
    assert (figures.rematerialised, figures.recipes_rematerialised) == (2, 5)


def test_nothing_at_all() -> None:
    figures = figures_of([result("best", None, status="no extra")])
    assert figures.fidelity.programs == 0 and figures.fidelity.wire.median is None
    assert figures.quality == () and figures.ratios() == {}
