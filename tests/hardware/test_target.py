"""Targets: rates by type, copies, and pure communication."""

from __future__ import annotations

import dataclasses
import math

import pytest

from rhino_jax.hardware.files import hardware_names, load_target
from rhino_jax.hardware.layout import lay_out
from rhino_jax.hardware.target import UNLIMITED_BYTES, Device, Target, Tier


def _with_peaks(**peaks: float) -> Target:
    device = Device(
        peak_flops_per_s=tuple(peaks.items()), hbm_bytes=1, hbm_bytes_per_s=1.0
    )
    return Target(name="t", device=device)


@pytest.mark.parametrize(
    ("dtype", "listed"),
    [
        ("bfloat16", "bfloat16"),
        ("float16", "bfloat16"),
        ("float32", "float32"),
        ("float64", "float32"),
        ("complex64", "float32"),
        ("complex128", "float32"),
        ("int8", "int8"),
        ("uint8", "int8"),
        ("int4", "int8"),
        ("int32", "float32"),
        ("bool", "float32"),
        ("key<fry>", "float32"),
        ("float8_e4m3fn", "bfloat16"),
        ("float8_e5m2", "bfloat16"),
    ],
)
def test_a_type_runs_at_the_rate_of_the_type_it_is_computed_in(
    dtype: str, listed: str
) -> None:
    peaks = {"bfloat16": 3.0, "float32": 2.0, "int8": 5.0}
    assert _with_peaks(**peaks).peak_flops_per_s(dtype) == peaks[listed]


def test_a_listed_float8_is_used() -> None:
    target = _with_peaks(bfloat16=3.0, float8=7.0)
    assert target.peak_flops_per_s("float8_e5m2") == 7.0


def test_types_that_nothing_is_said_of_run_at_the_lowest_rate() -> None:
    target = _with_peaks(bfloat16=3.0, int8=1.0)
    assert target.peak_flops_per_s("float64") == 1.0


@pytest.mark.parametrize("name", hardware_names())
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64", "int8", "int32"])
def test_every_target_has_a_rate_for_every_type(name: str, dtype: str) -> None:
    assert load_target(name).peak_flops_per_s(dtype) > 0


def test_replace_changes_device_and_target() -> None:
    target = load_target("v5e").replace(hbm_bytes=5, name="half", launch_s=1.0)
    assert (target.device.hbm_bytes, target.name, target.device.launch_s) == (
        5,
        "half",
        1.0,
    )
    assert target.tiers == load_target("v5e").tiers
    with pytest.raises(TypeError):
        target.replace(hbm_byte=5)


def test_targets_are_values() -> None:
    target = load_target("h100")
    assert target == load_target("h100")
    assert hash(target) == hash(load_target("h100"))
    with pytest.raises(dataclasses.FrozenInstanceError):
        target.name = "other"  # type: ignore[misc]


def test_pure_communication_takes_no_time_for_anything_else() -> None:
    target = Target.pure_communication({"x": (1e-6, 1e9), "y": (0.0, 2e9)})
    assert target.peak_flops_per_s("bfloat16") == math.inf
    assert target.device.hbm_bytes_per_s == math.inf
    assert target.device.launch_s == 0
    assert target.device.hbm_bytes == UNLIMITED_BYTES
    mesh = lay_out(target, [("y", 4), ("x", 2)])
    assert [(a.alpha_s, a.bytes_per_s) for a in mesh.axes] == [(0, 2e9), (1e-6, 1e9)]


def test_pure_communication_with_a_memory_bound() -> None:
    target = Target.pure_communication({"x": (0, 1)}, hbm_bytes=100)
    assert target.device.hbm_bytes == 100


@pytest.mark.parametrize(
    "link", [(-1.0, 1.0), (0.0, 0.0), (0.0, -1.0), (math.nan, 1.0)]
)
def test_pure_communication_refuses_impossible_links(link: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="axis 'x'"):
        Target.pure_communication({"x": link})


@pytest.mark.parametrize(
    ("multiple", "needs_all", "dims", "wraps"),
    [
        (1, False, (3, 8), (True, True)),
        (1, False, (1, 2), (False, False)),
        (0, False, (16, 16), (False, False)),
        (16, False, (8, 16), (False, True)),
        (4, True, (2, 4, 4), (False, False, False)),
        (4, True, (4, 4, 12), (True, True, True)),
    ],
)
def test_wrap_around(
    multiple: int, needs_all: bool, dims: tuple[int, ...], wraps: tuple[bool, ...]
) -> None:
    tier = Tier(
        name="t",
        alpha_s=0,
        bytes_per_s=1,
        topology="torus",
        wrap_multiple=multiple,
        wrap_needs_all=needs_all,
    )
    assert tier.wraps(dims) == wraps
