"""Meshes are made of devices as they are priced, whatever the torus."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

import rhino_jax as rhino
from rhino_jax.hardware.files import load_target
from rhino_jax.hardware.layout import mesh_axis_names, mesh_shapes
from rhino_jax.runtime.meshes import arranged, make_mesh


TOPOLOGIES = (
    *("v5e:2x2", "v5e:2x4", "v5e:4x4", "v5e:4x8", "v5e:8x8", "v5e:8x16", "v5e:16x16"),
    *("v6e:2x4", "v6e:4x8", "v6e:16x16", "v4:2x2x4", "v4:4x4x4", "v5p:2x2x2"),
    *("v5p:4x4x4", "v5p:4x4x12", "tpu7x:2x2x1", "tpu7x:4x4x4", "v5e:2x16x16"),
    *("h100:8", "h100:4x8", "a100:2x8"),
)


def present(monkeypatch: pytest.MonkeyPatch, name: str) -> list[Any]:
    """Return a topology's devices, which `jax.devices` returns from now on."""
    devices = sorted(rhino.compile_target(name).devices.flat, key=lambda d: d.id)
    monkeypatch.setattr(jax, "devices", lambda *_: devices)
    return devices


@pytest.mark.compile_only
@pytest.mark.parametrize("name", TOPOLOGIES)
def test_every_mesh_that_is_chosen_is_made_of_the_devices(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, devices = load_target(name), present(monkeypatch, name)
    shapes = mesh_shapes(target, len(devices))
    for shape in shapes:
        axes = tuple(zip(mesh_axis_names(target, len(shape)), shape, strict=True))
        made = make_mesh(axes, "this test")
        assert isinstance(made, jax.sharding.Mesh)
        assert set(made.devices.flat) == set(devices)
        np.testing.assert_array_equal(
            made.devices, rhino.compile_target(name, dict(axes)).devices
        )


@pytest.mark.compile_only
def test_axes_of_part_of_a_torus_dim_run_over_neighbours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    present(monkeypatch, "v6e:4x4")
    made = make_mesh((("x", 8), ("y", 2)), "this test")
    for pair in made.devices:
        a, b = (np.array(device.coords) for device in pair)
        assert abs(a - b).sum() == 1


@pytest.mark.compile_only
@pytest.mark.parametrize(
    ("name", "axes"),
    [
        ("v6e:16x16", {"x": 2, "y": 128}),
        ("v5p:4x4x4", {"x": 8, "y": 8}),
        ("v5e:2x16x16", {"x": 4, "y": 128}),
    ],
)
def test_exported_code_makes_the_same_mesh(
    name: str, axes: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = jax.ShapeDtypeStruct((4096, 512), "float32")
    plan = rhino.plan(lambda x: 2 * x, shape, mesh=axes, hardware=name, progress=False)
    expected = rhino.compile_target(name, axes)
    present(monkeypatch, name)
    scope: dict[str, Any] = {}
    exec(plan.code("explicit"), scope)
    for made in (scope["mesh"], scope["inside"]):
        np.testing.assert_array_equal(made.devices, expected.devices)
        assert made.axis_names == expected.axis_names


@pytest.mark.compile_only
def test_devices_that_are_no_box_are_taken_in_their_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    devices = present(monkeypatch, "v5e:4x4")
    assert arranged(devices[:6], (3, 2)).ravel().tolist() == devices[:6]
