"""Names of hardware with a topology, as `v5e:4x4`."""

from __future__ import annotations

import pytest

from rhino_jax.errors import HardwareError
from rhino_jax.hardware.files import (
    load_target,
)


@pytest.mark.parametrize(
    ("name", "devices", "sizes"),
    [
        ("v5e:4x4", 16, (16, None)),
        ("v5e:2x16x16", 512, (256, None)),
        ("v5e:64", 64, (256, None)),
        ("v5p:4x4x4", 64, (64, None)),
        ("tpu7x:2x2x2", 16, (2, 16, None)),
        ("tpu7x:8", 16, (2, 18432, None)),
        ("h100:8x8", 64, (8, 64)),
        ("h100:2x4", 8, (4, 8)),
        ("b200:1x72", 72, (72, 72)),
        ("h100:24", 24, (8, None)),
        ("cpu:8", 8, (None,)),
    ],
)
def test_topologies(name: str, devices: int, sizes: tuple[int | None, ...]) -> None:
    target = load_target(name)
    assert target.name == name
    assert target.num_devices == devices
    assert tuple(t.size for t in target.tiers) == sizes


@pytest.mark.parametrize(
    "name",
    ["v5e:32x16", "v5p:4x4", "v5e:0x4", "h100:2x2x2", "cpu:2x2", "v5e:1x2x4x4"],
)
def test_topologies_that_do_not_fit(name: str) -> None:
    with pytest.raises(HardwareError, match="does not fit") as info:
        load_target(name)
    assert "expected" in info.value.numbers and "v5e:4x4" in info.value.fix


@pytest.mark.parametrize(
    ("name", "what", "numbers"),
    [
        ("v5e:4x5x6", "no 4 slices of 5x6 chips", "got 5x6"),
        ("v5e:3x3", "no 3x3 chips", "1 or a multiple of 2, at most 16; got 3x3"),
        ("v6e:32x8", "no 32x8 chips", "got 32x8"),
        ("v5e:5", "no slice of 5 chips", "got 5"),
        ("v5p:5x5x5", "no 5x5x5 chips", "1 or a multiple of 2; got 5x5x5"),
        ("v4:4x4x5", "no 4x4x5 chips", "got 4x4x5"),
        ("tpu7x:2x3x4", "no 2x3x4 chips", "got 2x3x4"),
    ],
)
def test_topologies_that_are_not_built(name: str, what: str, numbers: str) -> None:
    with pytest.raises(HardwareError, match=what) as info:
        load_target(name)
    assert numbers in info.value.numbers
    assert "their number first" in info.value.fix


@pytest.mark.parametrize(
    "name",
    [
        "v5e:1x1", "v5e:2x2", "v5e:2x4", "v5e:4x2", "v5e:4x8", "v5e:8x16",
        "v6e:16x16", "v5e:3x16x16", "v4:2x2x1", "v4:2x4x4", "v4:4x4x8",
        "v4:12x16x16", "v5p:16x16x24", "v5p:2x2x2", "tpu7x:4x4x8", "v5e:12",
        "v5e:512", "v5p:192", "h100:3x5", "b200:2x72",
    ],
)  # fmt: skip
def test_topologies_that_are_built(name: str) -> None:
    assert load_target(name).num_devices


@pytest.mark.parametrize("name", ["h100:1x16", "a100:8x9", "b200:1x73"])
def test_more_gpus_than_one_switch_joins(name: str) -> None:
    with pytest.raises(HardwareError, match="does not fit") as info:
        load_target(name)
    assert "on one nvlink" in info.value.numbers


@pytest.mark.parametrize("name", ["v5e:", "v5e:axb", "v5e:4x", ":4x4", "v5e:-1"])
def test_topologies_that_are_none(name: str) -> None:
    with pytest.raises(HardwareError, match="not known"):
        load_target(name)
