"""Targets of devices that are here."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rhino_jax.errors import HardwareError, MeshError
from rhino_jax.hardware.files import (
    detect_target,
    load_target,
)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("TPU v4", "v4"),
        ("TPU v5 lite", "v5e"),
        ("TPU v5", "v5p"),
        ("TPU v5p", "v5p"),
        ("TPU v6 lite", "v6e"),
        ("TPU7x", "tpu7x"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA B200", "b200"),
        ("cpu", "cpu"),
    ],
)
def test_devices_are_recognised(kind: str, name: str) -> None:
    assert detect_target([SimpleNamespace(device_kind=kind)]) == load_target(name)


def test_the_devices_of_this_process_are_recognised() -> None:
    jax = pytest.importorskip("jax")
    assert detect_target(jax.devices("cpu")).name == "cpu"


def _tpus(kind: str, *spans: int, cores: int = 1, slices: int = 1) -> list[object]:
    x, y, z = (range(s) for s in spans)
    return [
        SimpleNamespace(
            device_kind=kind, coords=[i, j, k], core_on_chip=core, slice_index=s
        )
        for s in range(slices)
        for k in z
        for j in y
        for i in x
        for core in range(cores)
    ]


def test_the_torus_is_read_from_coordinates() -> None:
    target = detect_target(_tpus("TPU v5 lite", 8, 2, 1))
    assert target.tiers[0].dims == (8, 2)
    assert (target.name, target.num_devices) == ("v5e:8x2", 16)
    target = detect_target(_tpus("TPU v5 lite", 4, 4, 1, slices=2))
    assert target.tiers[0].dims == (4, 4) and target.num_devices == 32
    target = detect_target(_tpus("TPU7x", 2, 2, 4, cores=2))
    assert target.tiers[1].dims == (2, 2, 4) and target.num_devices == 32


def test_coordinates_with_holes_fix_no_torus() -> None:
    target = detect_target(_tpus("TPU v5 lite", 4, 4, 1)[:-1])
    assert target == load_target("v5e")


def test_devices_that_no_file_describes() -> None:
    device = SimpleNamespace(device_kind="NVIDIA H100 PCIe")
    with pytest.raises(HardwareError, match="'NVIDIA H100 PCIe'.*Did you mean") as info:
        detect_target([device])
    assert "'TPU v4' (v4)" in info.value.numbers and "hardware=" in info.value.fix


def test_devices_of_two_kinds() -> None:
    devices = [SimpleNamespace(device_kind=k) for k in ("cpu", "TPU v4")]
    with pytest.raises(HardwareError, match="several kinds"):
        detect_target(devices)


def test_no_devices() -> None:
    with pytest.raises(MeshError, match="no devices"):
        detect_target([])
