"""The order of a mesh's devices is the one that costs are estimated for."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental import mesh_utils
from jax.sharding import Mesh

from rhino_jax.errors import MeshError
from rhino_jax.hardware.compile_only import tpu_devices
from rhino_jax.hardware.files import load_target
from rhino_jax.hardware.layout import mesh_shapes
from rhino_jax.hardware.ordering import device_mesh, order_on
from rhino_jax.hardware.parts import MeshParts
from rhino_jax.runtime.meshes import make_mesh
from tests.verify.extras import skipped_without_extra


TOPOLOGIES = [
    *("v4:2x2x1", "v4:2x2x4", "v4:4x4x8", "v5e:2x2", "v5e:2x4", "v5e:4x4", "v5e:4x8"),
    *("v5e:8x16", "v5e:16x16", "v6e:2x4", "v6e:4x8", "v6e:16x16", "v5p:2x2x2"),
    *("v5p:2x4x4", "v5p:4x4x4", "v5p:8x8x8", "tpu7x:2x2x1", "tpu7x:2x2x4"),
    *("tpu7x:4x4x4", "v5e:2x4x4", "v5e:3x2x4", "v5p:2x2x4x4", "tpu7x:2x2x2x4"),
]


def torus_devices(name: str, *, real: bool = False) -> list[Any]:
    """Devices of a topology: those of its compiler, or objects with their places."""
    target = load_target(name)
    torus, count = target.torus, target.num_devices
    assert torus is not None and count is not None and torus.size is not None
    sides = (*torus.dims, 1)[:3]
    slices, cores = count // torus.size, torus.size // math.prod(sides)
    if real:
        topology = f"{name.partition(':')[0]}:{'x'.join(map(str, torus.dims))}"
        with skipped_without_extra():
            return list(tpu_devices(topology, slices))
    places = np.ndindex(slices, *sides[::-1], cores)
    kind = target.device.kinds[0]
    return [
        SimpleNamespace(platform="tpu", device_kind=kind, id=number, slice_index=s,
                        coords=(x, y, z), core_on_chip=core)
        for number, (s, z, y, x, core) in enumerate(places)
    ]  # fmt: skip


def _along(arranged: np.ndarray, axis: int) -> set[tuple[tuple[int, int], ...]]:
    """By coordinate the number and the distance of an axis's devices, of every line."""
    found = set()
    for line in np.moveaxis(arranged, axis, -1).reshape(-1, arranged.shape[axis]):
        spans = []
        for along in zip(*(d.coords for d in line), strict=True):
            at = sorted(set(along))
            steps = {int(b - a) for a, b in itertools.pairwise(at)}
            assert len(steps) <= 1
            spans.append((len(at), steps.pop() if steps else 1))
        found.add(tuple(spans))
    return found


def _estimated(name: str, shape: tuple[int, ...], axis: int) -> tuple[Any, ...]:
    target = load_target(name)
    assert target.torus is not None
    (_, pieces) = MeshParts.of(target, shape).torus[target.tiers.index(target.torus)]
    spans: dict[int, tuple[int, int]] = defaultdict(lambda: (1, 1))
    for piece in pieces.get(axis, ()):
        spans[piece.dim] = (piece.size, piece.stride)
    return tuple(spans[dim] for dim in range(3))


def _check_every_shape(name: str, *, real: bool) -> None:
    devices = torus_devices(name, real=real)
    for shape in mesh_shapes(load_target(name), len(devices)):
        arranged = device_mesh(shape, devices)
        assert arranged is not None and arranged.shape == shape
        assert len(set(map(id, arranged.flat))) == len(devices)
        for axis in range(len(shape)):
            assert _along(arranged, axis) == {_estimated(name, shape, axis)}, shape


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_every_shape_is_made_as_it_is_estimated(name: str) -> None:
    _check_every_shape(name, real=False)


@pytest.mark.compile_only
@pytest.mark.parametrize("name", TOPOLOGIES)
def test_of_the_devices_of_the_compiler(name: str) -> None:
    _check_every_shape(name, real=True)


@pytest.mark.parametrize("name", ["v5e:4x8", "v6e:16x16", "v5p:4x4x4", "v4:4x4x8"])
def test_the_order_is_that_of_create_device_mesh(name: str) -> None:
    devices = torus_devices(name)
    for shape in mesh_shapes(load_target(name), len(devices), max_axes=4):
        made = mesh_utils.create_device_mesh(
            shape, devices, allow_split_physical_axes=True
        )
        assert (device_mesh(shape, devices) == made).all()


def test_devices_of_a_chip_and_of_a_slice_are_neighbours() -> None:
    chips = device_mesh((4, 4, 2), torus_devices("tpu7x:2x2x4"))
    assert chips is not None
    assert all(len({d.coords for d in pair}) == 1 for pair in chips.reshape(-1, 2))
    rows = device_mesh((8, 4), torus_devices("v5e:2x4x4"))
    assert rows is not None
    assert all(len({d.slice_index for d in row}) == 1 for row in rows)


@pytest.mark.parametrize(
    ("name", "shape", "box"),
    [
        ("v5e:2x4", (3, 2), (1, 2, 3, 1, 1)),
        ("v6e:16x16", (2, 64), (1, 16, 8, 1, 1)),
        ("v5p:4x4x4", (6, 6), (1, 3, 3, 4, 1)),
        ("tpu7x:2x2x2", (3,), None),
        ("v5e:2x4", (7,), None),
        ("v5e:2x4x4", (3, 2, 4), (2, 3, 4, 1, 1)),
        ("v5e:2x4x4", (16,), (1, 4, 4, 1, 1)),
    ],
)
def test_fewer_devices_fill_a_box(
    name: str, shape: tuple[int, ...], box: tuple[int, ...] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    devices = torus_devices(name)
    arranged = device_mesh(shape, devices)
    if box is None:
        assert arranged is None
        monkeypatch.setattr(jax, "devices", lambda *_: devices)
        with pytest.raises(MeshError, match="no box of the present devices"):
            make_mesh(tuple(zip("xyz", shape, strict=False)), "`plan`")
        return
    assert arranged is not None and arranged.shape == shape
    places = [(d.slice_index, *d.coords, d.core_on_chip) for d in arranged.flat]
    spans = zip(*places, strict=True)
    assert tuple(len(set(along)) for along in spans) == box


def test_no_box_has_holes() -> None:
    devices = torus_devices("v5e:2x4")
    assert device_mesh((2, 4), devices[:5] + devices[6:]) is None
    assert order_on((1, 2, 4, 1), (16,)) is None


def test_other_devices_are_in_the_order_of_ids() -> None:
    mesh = make_mesh((("x", 2), ("y", 3)), "`plan`")
    assert isinstance(mesh, Mesh)
    assert [d.id for d in mesh.devices.flat] == list(range(6))
