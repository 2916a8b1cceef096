"""Open sums are priced as what compilers make of them: nothing but the collective."""

from __future__ import annotations

import numpy as np
import pytest

from rhino_jax.analysis.program_analysis import ProgramAnalysis
from rhino_jax.analysis.uses import are_views
from rhino_jax.hardware.files import load_target
from rhino_jax.ir.program import Program
from rhino_jax.model.strategies import moves, strategies
from tests.passes.deferred_reductions.cases import cases, more_cases
from tests.passes.deferred_reductions.pricing import delayed_everywhere
from tests.passes.deferred_reductions.traffic import planned


def views(program: Program, hardware: str) -> int:
    analysis = ProgramAnalysis.of(program, load_target(hardware))
    return int(np.count_nonzero(are_views(analysis.graph)))


@pytest.mark.parametrize("hardware", ["v5e:2x4", "h100:8"])
def test_parted_operands_are_views(hardware: str) -> None:
    case = cases(64, 64)["two products"]
    _, again, _ = delayed_everywhere(case.fn, case.args, 8)
    assert views(again.program, hardware) == 4
    assert views(planned(case, (("x", 8),), hardware).traced.program, hardware) == 0


def test_groups_of_convolutions_are_views() -> None:
    case = more_cases()["convolutions"]
    traced, again, _ = delayed_everywhere(case.fn, case.args, 8)
    assert views(traced.program, "v5e:2x4") == 0
    assert views(again.program, "v5e:2x4") == 8


def test_compute_takes_hardly_longer() -> None:
    found = planned(cases(512, 4096)["q, k, v"], (("x", 8),), "cpu:8")
    before, after = (p.predicted for p in (found.first, found.best))
    # Sums are added while they are whole, where the first plan adds scattered ones.
    assert after.compute_s < 1.4 * before.compute_s
    assert after.communication_s < 0.7 * before.communication_s


@pytest.mark.parametrize("hardware", ["v5e:2x4", "h100:8"])
def test_compilers_that_add_partial_results_first_gain_nothing(hardware: str) -> None:
    found = planned(cases(512, 4096)["q, k, v"], (("x", 8),), hardware)
    assert found.best.predicted == found.first.predicted


def test_a_sum_over_single_indices_moves_nothing() -> None:
    case = cases(64, 64)["two products"]
    _, again, _ = delayed_everywhere(case.fn, case.args, 8)
    op = next(op for op in again.program.ops if op.name == "reduce_sum")
    assert op.rule is not None
    found = strategies(op.rule, (again.program.values[op.results[0]].shape,), (4, 2))
    moved = moves(op, found, (4, 2))
    whole = [len(s.cut[0]) == 2 for s in found]
    assert moved.tolist() == [0.0 if w else 1.0 for w in whole] and any(whole)
