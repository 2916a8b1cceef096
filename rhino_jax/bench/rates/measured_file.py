"""Measured rates as a complete hardware file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from rhino_jax.bench.rates.measure import Measured
from rhino_jax.errors import HardwareError
from rhino_jax.hardware.files import detect_target
from rhino_jax.hardware.target import Device


_BEHAVIOUR = (
    "launch_s", "overlap_share", "hidable_share", "free_share", "fuses_matmuls",
    "hoists_conversions", "gathers_by_axis", "scatters_by_axis", "combines",
    "calls_cudnn", "parts_columns", "defers_gradients", "masks_groups",
    "sinks_broadcasts", "recomputes", "clock_hz", "systolic_array",
)  # fmt: skip
"""Keys that are not measured: copied from the shipped file of the same device kind."""


def hardware_file(measured: Measured, devices: Sequence[Any], name: str) -> str:
    """Return the text of a hardware file, as `load_target` reads it.

    Args:
      measured: rates of the devices.
      devices: the devices themselves, for their memory and kind.
      name: name of the hardware.
    """
    size, why = memory_bytes(devices)
    shipped, shipped_name = _shipped(devices)
    rows = [
        f"# Made by `python -m rhino_jax measure` on {measured.num_devices} devices of"
        f" kind {measured.kind!r}, all at work.",
        f"name = {_toml(name)}",
        f"device_kinds = [{_toml(measured.kind)}]",
        "matmul_efficiency = 1.0  # the rates below are what matmuls reach",
        "memory_efficiency = 1.0  # and loops",
    ]
    if shipped is not None:
        usual = Device(peak_flops_per_s=(), hbm_bytes=0, hbm_bytes_per_s=0.0)
        kept = [n for n in _BEHAVIOUR if getattr(shipped, n) != getattr(usual, n)]
        rows += [
            f"{n} = {_toml(getattr(shipped, n))}  # not measured: as of {shipped_name}"
            for n in kept
        ]
    rows += ["", "[peak_flops_per_s]"]
    rows += [f"{dtype} = {rate:.3e}" for dtype, rate in measured.flops_per_s.items()]
    rows += [
        "",
        "[memory]",
        f"hbm_bytes = {size}  # {why}",
        f"hbm_bytes_per_s = {measured.hbm_bytes_per_s:.3e}",
    ]
    if shipped is not None and shipped.reserve_share:
        rows.append(f"reserve_share = {shipped.reserve_share}  # as of {shipped_name}")
    if shipped is not None and shipped.tile:
        rows.append(f"tile = {list(shipped.tile)}  # as of {shipped_name}")
    if measured.error is not None:
        rows += [
            "",
            f"[[tiers]]  # median error of collectives {measured.error:.0%}",
            'name = "links"',
            f"topology = {_toml(measured.topology)}",
            f"alpha_s = {measured.alpha_s:.3e}",
            f"bytes_per_s = {measured.bytes_per_s:.3e}",
        ]
    return "\n".join(rows)


def memory_bytes(devices: Sequence[Any]) -> tuple[int, str]:
    """Return the memory of one device, and the source of the number."""
    stats = devices[0].memory_stats() or {}
    if limit := stats.get("bytes_limit"):
        return int(limit), "what the runtime lets a process use"
    if devices[0].platform == "cpu":
        host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return host // len(devices), "the host's, divided by the devices"
    shipped, name = _shipped(devices)
    if shipped is not None:
        return shipped.hbm_bytes, f"not measured: as of {name}"
    raise HardwareError(
        "`measure`: the runtime does not say how much memory a device has.",
        where=str(devices[0]),
        fix="copy a file of configs/hardware and fill in the rates by hand.",
    )


def _shipped(devices: Sequence[Any]) -> tuple[Device | None, str]:
    """Return the shipped description of such devices and its name; None without one."""
    try:
        target = detect_target(devices)
    except HardwareError:
        return None, ""
    return target.device, target.name


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, tuple | list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return repr(value)
