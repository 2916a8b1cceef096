"""The usual topology of a number of devices."""

from __future__ import annotations

import math

import pytest

from rhino_jax.errors import HardwareError
from rhino_jax.hardware.files import load_target
from rhino_jax.verify.targets import devices_per_chip, topology_for
from tests.verify.extras import mesh_of_target


TPUS = ("v4", "v5e", "v5p", "v6e", "tpu7x")


@pytest.mark.parametrize(
    ("hardware", "count", "expected"),
    [
        # The slices of cloud.google.com/tpu/docs/v5e.
        ("v5e", 1, "v5e:1x1"),
        ("v5e", 4, "v5e:2x2"),
        ("v5e", 8, "v5e:2x4"),
        ("v5e", 16, "v5e:4x4"),
        ("v5e", 32, "v5e:4x8"),
        ("v5e", 64, "v5e:8x8"),
        ("v5e", 128, "v5e:8x16"),
        ("v5e", 256, "v5e:16x16"),
        # A slice holds 256: two of them.
        ("v5e", 512, "v5e:2x16x16"),
        ("v6e", 6, "v6e:1x6"),
        # The slices of cloud.google.com/tpu/docs/v5p.
        ("v5p", 4, "v5p:2x2x1"),
        ("v5p", 8, "v5p:2x2x2"),
        ("v5p", 16, "v5p:2x2x4"),
        ("v5p", 32, "v5p:2x4x4"),
        ("v5p", 64, "v5p:4x4x4"),
        ("v4", 128, "v4:4x4x8"),
        # Rings in all dims, though 6x6x6 is more cubic.
        ("v5p", 192, "v5p:4x4x12"),
        # Two devices a chip.
        ("tpu7x", 2, "tpu7x:1x1x1"),
        ("tpu7x", 8, "tpu7x:2x2x1"),
        ("tpu7x", 128, "tpu7x:4x4x4"),
        ("h100", 1, "h100:1x1"),
        ("h100", 4, "h100:1x4"),
        ("h100", 8, "h100:1x8"),
        ("h100", 12, "h100:2x6"),
        ("h100", 64, "h100:8x8"),
        ("a100-40gb", 16, "a100-40gb:2x8"),
    ],
)
def test_the_usual_topology(hardware: str, count: int, expected: str) -> None:
    assert topology_for(hardware, count) == expected
    assert load_target(expected).num_devices == count


@pytest.mark.parametrize(
    ("hardware", "count"),
    [("v5e", 15), ("v5e", 0), ("v5p", -1), ("tpu7x", 7), ("cpu", 8), ("v5e:4x4", 16)],
)
def test_numbers_without_a_topology(hardware: str, count: int) -> None:
    with pytest.raises(HardwareError, match=f"no topology of {count}") as info:
        topology_for(hardware, count)
    assert info.value.numbers and info.value.fix


def test_names_that_are_not_known() -> None:
    with pytest.raises(HardwareError, match="Did you mean 'v5p'"):
        topology_for("v5pp", 8)


@pytest.mark.compile_only
@pytest.mark.parametrize("hardware", TPUS)
def test_libtpu_knows_every_topology_that_is_proposed(hardware: str) -> None:
    target = load_target(hardware)
    torus = target.torus
    assert torus is not None
    for chips in (1, 2, 4, 6, 8, 12, 16, 24, 32, 36, 48, 64, 96, 128, 192, 256, 512):
        count = chips * devices_per_chip(target)
        name = topology_for(hardware, count)
        devices = mesh_of_target(name).devices
        assert devices.size == count
        sides = load_target(name).tiers[-2].dims
        coords = list(zip(*(d.coords for d in devices.flat), strict=True))
        spans = [len(set(along)) for along in coords]
        assert tuple(spans[: len(sides)]) == sides
        assert math.prod(spans) == math.prod(sides)
