"""Measured rates of the devices that are present, as a hardware file states them.

Every figure is the time of one additional step of a loop, with all devices busy at
once, so that the overhead of a call is not included. Links are measured over all
devices and over groups of them; latency and bandwidth are those with which the cost
model reproduces these times. `hardware_file` writes them all.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from rhino_jax.bench.timing import mean_s
from rhino_jax.cost.collectives import collective_s
from rhino_jax.errors import HardwareError
from rhino_jax.hardware.files import detect_target
from rhino_jax.hardware.mesh import MeshAxis
from rhino_jax.hardware.target import Device
from rhino_jax.ir.collectives import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, KINDS
from rhino_jax.utils.progress import Progress


SAMPLES = 9
"""Number of runs of each loop; the median is used."""

STEPS = (4, 20)
"""Steps of the shorter and of the longer loop."""

LONG_S = 2e-3
"""Operands are doubled until a step of the loop takes this long."""

SMALL, LARGE = 1 << 10, 1 << 20
"""Elements per device of the collectives that determine latency and bandwidth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Measured rates.

    Attributes:
      kind: `jax.Device.device_kind`.
      num_devices: number of devices.
      flops_per_s: type → FLOPs per second of square matmuls, on each device.
      hbm_bytes_per_s: bytes per second read and written by one device.
      topology, alpha_s, bytes_per_s: of the links, as in a hardware file; None for one
        device.
      error: median of |fitted - measured| / measured seconds of collectives.
    """

    kind: str
    num_devices: int
    flops_per_s: dict[str, float]
    hbm_bytes_per_s: float
    topology: str | None = None
    alpha_s: float | None = None
    bytes_per_s: float | None = None
    error: float | None = None


def measure(devices: Sequence[Any]) -> Measured:
    """Measure the devices; takes about a minute on emulated ones."""
    one = _Devices(devices, (len(devices),))
    with Progress(doing="measuring matmuls and memory").ticking():
        flops = {name: _matmul_rate(one, name) for name in ("float32", "bfloat16")}
        measured = Measured(
            kind=devices[0].device_kind,
            num_devices=len(devices),
            flops_per_s=flops,
            hbm_bytes_per_s=_memory_rate(one),
        )
    if len(devices) == 1:
        return measured
    # A switch, or a barrier for threads of one process.
    topology = "barrier" if devices[0].platform == "cpu" else "switch"
    with Progress(doing="measuring collectives").ticking():
        found = []
        for group in [n for n in (2, 4, 8) if len(devices) % n == 0]:
            mesh = _Devices(devices, (len(devices) // group, group))
            for n in (SMALL, LARGE):
                for kind, op in _OPS.items():
                    taken_s = mesh.step_s(partial(op, group), n, dtype="float32")
                    held = 4 * n * (group if KINDS[kind].gathers else 1)
                    found.append(_Sample(kind, held, group, n == LARGE, taken_s))
    return _with_links(measured, topology, found)


@dataclass(frozen=True, slots=True)
class _Devices:
    """Devices in groups: a mesh of two axes, of which the last is the group."""

    devices: Sequence[Any]
    shape: tuple[int, ...]

    def step_s(self, op: Callable[[Any], Any], *shape: int, dtype: str) -> float:
        """Return seconds of `op`, from a shard per device to one of equal shape."""
        names = ("outer", "inner")[-len(self.shape) :]
        mesh = jax.sharding.Mesh(
            np.array(self.devices).reshape(self.shape),
            names,
            axis_types=(AxisType.Auto,) * len(names),
        )
        spec = PartitionSpec(names)
        rows = len(self.devices) * shape[0]
        # Random numbers: an H100 reached 834 TFLOP/s in bfloat16 with constants that
        # grow to infinity, and 808 with these.
        x = jax.random.normal(jax.random.key(0), (rows, *shape[1:]), dtype)
        x = jax.device_put(x, NamedSharding(mesh, spec))

        @jax.jit
        @partial(
            jax.shard_map,
            mesh=mesh,
            in_specs=(PartitionSpec(), spec),
            out_specs=spec,
            check_vma=False,
        )
        def loop(steps: Any, x: Any) -> Any:
            return jax.lax.fori_loop(0, steps, lambda _, x: op(x), x)

        short, long = (
            statistics.median(mean_s(partial(loop, steps, x)) for _ in range(SAMPLES))
            for steps in STEPS
        )
        return (long - short) / (STEPS[1] - STEPS[0])


def _grow(seconds: Callable[[int], float], size: int) -> tuple[int, float]:
    """Return the first size, doubled from `size`, whose step is long (`LONG_S`)."""
    while (taken_s := seconds(size)) < LONG_S:
        size *= 2
    return size, taken_s


def _matmul_rate(devices: _Devices, dtype: str) -> float:
    def seconds(n: int) -> float:
        # Scaled so that repeated products stay as large as the random matrix.
        return devices.step_s(lambda x: x @ x * n**-0.5, n, n, dtype=dtype)

    size, taken_s = _grow(seconds, 256)
    return 2 * size**3 / taken_s


def _memory_rate(devices: _Devices) -> float:
    def seconds(n: int) -> float:
        return devices.step_s(lambda x: x * 0.5, n, dtype="float32")

    size, taken_s = _grow(seconds, 1 << 20)
    return 2 * 4 * size / taken_s


@dataclass(frozen=True, slots=True)
class _Sample:
    """One measured collective.

    Attributes:
      kind: kind of the collective.
      local_bytes: bytes per device, as the cost model counts them.
      size: number of devices in a group.
      is_large: whether it determines bandwidth, not latency.
      taken_s: measured seconds.
    """

    kind: str
    local_bytes: int
    size: int
    is_large: bool
    taken_s: float


def _all_gather(size: int, x: Any) -> Any:
    parts = jax.lax.all_gather(x, "inner")
    # Added one by one: XLA:CPU reduces a leading dim far slower than it gathers, and
    # the reduction would dominate the measured time.
    return sum(parts[i] for i in range(size)) / size


def _all_to_all(size: int, x: Any) -> Any:
    parts = x.reshape(size, -1)
    return jax.lax.all_to_all(parts, "inner", 0, 0, tiled=True).reshape(-1)


_OPS: Mapping[str, Callable[[int, Any], Any]] = {
    ALL_REDUCE: lambda size, x: jax.lax.psum(x, "inner") / size,
    ALL_GATHER: _all_gather,
    ALL_TO_ALL: _all_to_all,
}


def _with_links(
    measured: Measured, topology: str, samples: Sequence[_Sample]
) -> Measured:
    """Fit latency to the small collectives, then bandwidth to the large ones."""
    unit = MeshAxis("inner", 1, 1.0, float("inf"), topology)
    steps = np.array([_priced(s, unit) for s in samples])
    copying = replace(unit, alpha_s=0.0, bytes_per_s=1.0)
    copied = np.array([_priced(s, copying) for s in samples])
    taken = np.array([s.taken_s for s in samples])
    is_large = np.array([s.is_large for s in samples])
    alpha_s = np.median((taken / steps)[~is_large])
    rate = np.median(copied[is_large] / (taken - alpha_s * steps)[is_large])
    errors = np.abs((alpha_s * steps + copied / rate) / taken - 1)
    return replace(
        measured,
        topology=topology,
        alpha_s=float(alpha_s),
        bytes_per_s=float(rate),
        error=float(np.median(errors)),
    )


def _priced(sample: _Sample, axis: MeshAxis) -> float:
    axis = replace(axis, size=sample.size)
    return collective_s(sample.kind, sample.local_bytes, [axis])


_BEHAVIOUR = (
    "launch_s", "overlap_share", "hidable_share", "free_share", "fuses_matmuls",
    "hoists_conversions", "gathers_by_axis", "scatters_by_axis", "combines",
    "reassociates",
    "combines_levels", "awaits_sums", "rounds_products", "calls_cudnn", "parts_columns",
    "defers_gradients", "masks_groups", "tiles_groups", "sinks_broadcasts",
    "copies_stacks", "fuses_rotations", "fuses_by_bytes", "loops_windows",
    "splits_complex", "loops_on_chip", "sparse_cores", "recomputes", "clock_hz",
    "systolic_array",
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
