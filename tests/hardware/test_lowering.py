"""What compilers make of shardings, as hardware files have it."""

from __future__ import annotations

import pytest

from rhino_jax.hardware.files import load_target
from rhino_jax.hardware.layout import lay_out
from rhino_jax.hardware.lowering import AS_WRITTEN, LoweringPolicy


@pytest.mark.parametrize(
    ("target", "loops_matmuls"),
    [("v5e:4x4", True), ("v5p:4x4x4", False), ("h100:8", False)],
)
def test_large_matmuls_are_loops_on_tori_of_two_dims(
    target: str, loops_matmuls: bool
) -> None:
    assert load_target(target).device.lowering.loops_matmuls == loops_matmuls


def test_a_mesh_is_lowered_as_its_devices_are() -> None:
    target = load_target("h100:8")
    mesh = lay_out(target, [("data", 8)])
    assert mesh.lowering == target.device.lowering
    changed = target.replace(gathers_by_axis=True)
    assert lay_out(changed, [("data", 8)]).lowering.gathers_by_axis


def test_routes_keep_what_they_depend_on() -> None:
    policy = LoweringPolicy(gathers_by_axis=True, scatters_by_axis=True, combines=True)
    assert policy.routes == LoweringPolicy(gathers_by_axis=True)
    told_less = policy.without_waypoints()
    assert not told_less.routes.annotates_waypoints
    assert AS_WRITTEN.routes == AS_WRITTEN
