"""With sums left open, plans send what programs written by hand do (TPU, GPU)."""

from __future__ import annotations

import pytest

from tests.passes.deferred_reductions.cases import cases, more_cases
from tests.passes.deferred_reductions.traffic import planned, sent_by_hand, sent_by_plan
from tests.verify.extras import mesh_of_target


pytestmark = pytest.mark.compile_only

SIZES = {"accumulation": (16384, 1024)}
"""Rows and features, where the layout that is written by hand is the best one."""


@pytest.mark.parametrize("hardware", ["v5e:2x4", "h100:8"])
@pytest.mark.parametrize("name", cases(512, 4096))
def test_plans_send_what_is_sent_by_hand(name: str, hardware: str) -> None:
    mesh = mesh_of_target(hardware, {"x": 8})
    case = cases(*SIZES.get(name, (512, 4096)))[name]
    found = planned(case, (("x", 8),), hardware)
    names = [t.name for t in found.best.transforms]
    # These compilers add the partial results of products first, as the plan knows.
    if name in ("q, k, v", "gate and up"):
        assert not names and found.best.predicted == found.first.predicted
    elif (name, hardware) != ("two products", "v5e:2x4"):  # there either takes as long
        assert names[-1] == "deferred reductions"
        assert found.best.predicted.step_time_s < found.first.predicted.step_time_s
    by_hand = sent_by_hand(case, mesh)
    assert sent_by_plan(found.again, found.best, mesh) < 1.05 * by_hand


@pytest.mark.parametrize("hardware", ["v5e:2x4", "h100:8"])
@pytest.mark.parametrize("name", more_cases())
def test_other_sums_send_what_is_sent_by_hand(name: str, hardware: str) -> None:
    mesh, case = mesh_of_target(hardware, {"x": 8}), more_cases()[name]
    found = planned(case, (("x", 8),), hardware)
    assert found.best.transforms[-1].name == "deferred reductions"
    by_hand = sent_by_hand(case, mesh)
    assert sent_by_plan(found.again, found.best, mesh) < 1.05 * by_hand
    assert sent_by_plan(found.traced, found.first, mesh) > 2 * by_hand
