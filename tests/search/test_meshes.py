"""Meshes that the search chooses from, where none is given."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rhino_jax.hardware.files import load_target
from rhino_jax.planner.search import compare
from rhino_jax.planner.search.records import LIMITS
from tests.search.zoo import planned


# Starting the kernels of so small a program would take the most time.
TARGET = load_target("v5e:4x2").replace(launch_s=0.0)


def test_three_axes_are_tried_where_two_gain() -> None:
    plan = planned("wide-resnet-tiny", None, TARGET, level="fast")
    best = {len(shape): step_s for shape, step_s in plan.meshes}
    assert set(best) == {1, 2, 3}
    assert best[2] < 0.99 * best[1]
    assert not any("not tried" in note for note in plan.notes)


def test_three_axes_are_left_out_where_two_gain_nothing_and_that_is_said() -> None:
    plan = planned("mlp-data", None, "v5e:4x2", level="fast")
    best = {len(shape): step_s for shape, step_s in plan.meshes}
    assert set(best) == {1, 2}
    assert best[2] > 0.99 * best[1]
    (note,) = (note for note in plan.notes if "not tried" in note)
    assert "the axis before gained less than 1%: 1." in note


def test_three_axes_are_left_out_of_large_programs_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where two gain, as here."""
    monkeypatch.setattr(compare, "LIMITS", replace(LIMITS, meshes_s=0.0))
    plan = planned("wide-resnet-tiny", None, TARGET, level="fast")
    assert {len(shape) for shape, _ in plan.meshes} == {1, 2}
    (note,) = (note for note in plan.notes if "not tried" in note)
    assert "the program is large: 1." in note


@pytest.mark.parametrize(("limit_s", "count"), [(20.0, 2), (2000.0, 3)])
def test_a_time_limit_says_how_long_more_axes_may_take(
    limit_s: float, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare, "LIMITS", replace(LIMITS, another_axis_s=1e-3))
    plan = planned("wide-resnet-tiny", None, TARGET, level="fast", time_limit_s=limit_s)
    assert {len(shape) for shape, _ in plan.meshes} == set(range(1, count + 1))
