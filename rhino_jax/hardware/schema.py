"""The format of hardware files, and their parser.

Every key with an example, its default, and its meaning:

name = "mycluster"                  # optional: else the file's name
device_kinds = ["NVIDIA H100 PCIe"] # optional: `jax.Device.device_kind`
matmul_efficiency = 0.7             # in (0, 1]
memory_efficiency = 0.8             # in (0, 1]
launch_s = 3e-6                     # optional, 0
clock_hz = 1.5e9                    # optional, none: of the compiler's cycle estimates
overlap_share = 0.5                 # optional, 0: no collective hides behind compute
hidable_share = 0.6                 # optional, 1; see `Device`
free_share = 0.9                    # optional, hidable_share; see `Device`
fuses_matmuls = false               # optional, false; see `Device`
hoists_conversions = false          # optional, false; see `Device`
gathers_by_axis = false             # optional, false; see `Device`
scatters_by_axis = false            # optional, false; see `Device`
combines = false                    # optional, false; see `Device`
reassociates = false                # optional, false; see `Device`
combines_levels = false             # optional, false; see `Device`
awaits_sums = false                 # optional, false; see `Device`
rounds_products = false             # optional, false; see `Device`
calls_cudnn = false                 # optional, false; see `Device`
parts_columns = false               # optional, false; see `Device`
defers_gradients = false            # optional, false; see `Device`
masks_groups = false                # optional, false; see `Device`
tiles_groups = false                # optional, false; see `Device`
sinks_broadcasts = true             # optional, false; see `Device`
copies_stacks = false               # optional, false; see `Device`
fuses_rotations = false             # optional, false; see `Device`
fuses_by_bytes = false              # optional, false; see `Device`
loops_windows = false               # optional, false; see `Device`
splits_complex = false              # optional, false; see `Device`
loops_on_chip = false               # optional, false; see `Device`
sparse_cores = false                # optional, false; see `Device`
price_per_hour = 1.2                # optional, none: of one device; see `Device`
recomputes = ["exp", "tanh.float32"] # optional, []; see `Device`
systolic_array = 128                # optional, 0; see `Device`

[peak_flops_per_s]                  # by type; at least one; `inf` is allowed
float32 = 4e14

[kernels]                           # optional; see `KernelRates`
vector_ops_per_s = 3e13             # optional, inf
special_ops = 10                    # optional, inf
reduce_ops = 4                      # optional, 1
factor_flops_per_s = 6e12           # optional, inf
sort_passes = 2                     # optional, 0: one read and write
fft_passes = 1.4                    # optional, 0: one read and write
conv_tile = [32, 128]               # optional, []
conv_s = 1e-5                       # optional, 0
conv_gradient_share = 0.5           # optional, 1

[memory]
hbm_bytes = 64_000_000_000
hbm_bytes_per_s = 2e12
on_chip_bytes = 134_217_728         # optional, 0; see `Device`
on_chip_bytes_per_s = 5e12          # optional, inf; see `Device`
on_chip_peak_bytes_per_s = 5e12     # optional, none; see `Device`
reserve_share = 0.05                # optional, 0; see `Device`
host_bytes_per_s = 1.5e10           # optional, none; see `Device`
tile = [8, 128]                     # optional, none; see `Device`

[[tiers]]                           # any number, innermost first
name = "nvlink"
topology = "switch"                 # or "barrier": threads of one process
size = 8                            # devices within reach; the last may omit it
largest = 72                        # optional, `size`; see `Tier`
alpha_s = 3e-6
bytes_per_s = 4.5e11                # of one device, one direction

[[tiers]]
name = "ici"
topology = "torus"
dims = [4, 4]                       # or `rank = 2` and `size = 256`
wrap_multiple = 1                   # optional; see `Tier`
wrap_needs_all = false              # optional; see `Tier`
alpha_s = 1e-6
bytes_per_s = 4.5e10                # of one link, one direction

[links.x]                           # optional, instead of tiers: by mesh axis
alpha_s = 1e-6
bytes_per_s = 1e9
topology = "switch"                 # optional: "ring", "line", "switch" or "barrier"
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, fields, replace
from typing import Any

from rhino_jax.errors import HardwareError
from rhino_jax.hardware.target import AxisLink, Device, KernelRates, Target, Tier
from rhino_jax.utils.checked_table import CheckedTable


_PER_S, _UP_TO_1 = "operations per second, above 0", "a number above 0 and at most 1"
_NUMBERS = (
    ("_efficiency", _UP_TO_1, 1.0),
    ("_gradient_share", _UP_TO_1, 1.0),
    ("reserve_share", "a share in [0, 0.9]", 0.9),
    ("_share", "a share in [0, 1]", 1.0),
    ("bytes_per_s", "bytes per second, above 0", math.inf),
    ("ops_per_s", _PER_S, math.inf),
    ("_hz", "cycles per second, above 0", math.inf),
    ("_s", "seconds, at least 0", math.inf),
    ("_ops", "operations, above 0", math.inf),
    ("_passes", "passes, at least 0", math.inf),
    ("_per_hour", "a price, at least 0", math.inf),
)
"""(End of the name of a number, what it may be, the largest)."""

_LEAST = {"size": 2, "on_chip_bytes": 0, "systolic_array": 0, "wrap_multiple": 0}


_DTYPES = (
    "float64", "float32", "float16", "bfloat16", "float8", "int8", "complex64",
    "complex128",
)  # fmt: skip
_MEMORY = (
    "hbm_bytes", "hbm_bytes_per_s", "on_chip_bytes", "on_chip_bytes_per_s",
    "on_chip_peak_bytes_per_s", "reserve_share", "host_bytes_per_s", "tile",
)  # fmt: skip
_TABLES = ("peak_flops_per_s", "kernels")
_DEVICE = tuple(
    f.name for f in fields(Device) if f.name not in (*_MEMORY, *_TABLES, "kinds")
)
_TORUS_ONLY = ("rank", "dims", "wrap_multiple", "wrap_needs_all", "side_step",
               "longest_side")  # fmt: skip


def parse_target(entries: Mapping[str, Any], *, file: str, name: str) -> Target:
    """Return the target that a hardware file describes.

    Args:
      entries: the file's content, as read from TOML.
      file: name of the file, for errors.
      name: the target's name if the file does not state one.
    Raises:
      HardwareError: a key is missing, unknown, or has a wrong value.
    """
    top = CheckedTable(
        entries, "hardware file", file, HardwareError, numbers=_NUMBERS, least=_LEAST
    )
    top.refuse_unknown(
        ("name", "device_kinds", *_DEVICE, *_TABLES, "memory", "tiers", "links")
    )
    every = top.table("links") if "links" in entries else replace(top, entries={})
    return Target(
        name=top.get("name", str, name),
        device=_parse_device(top),
        tiers=() if every.entries and "tiers" not in entries else _parse_tiers(top),
        links=tuple((x, every.table(x).record(AxisLink)) for x in every.entries),
    )


def _parse_device(top: CheckedTable) -> Device:
    memory, peaks = top.table("memory"), top.table("peak_flops_per_s")
    memory.refuse_unknown(_MEMORY)
    peaks.refuse_unknown(_DTYPES)
    if not peaks.entries:
        raise top.fail("peak_flops_per_s", "at least one type, as float32", {})
    for name in ("matmul_efficiency", "memory_efficiency"):
        top.get(name, float)
    rates = KernelRates()
    if "kernels" in top.entries:
        table = top.table("kernels")
        rates = table.record(KernelRates)
        _check_pair(table, "conv_tile", "input and output channels, as [32, 128]")
    _check_pair(memory, "tile", "rows and lanes, as [8, 128]")
    return Device(
        peak_flops_per_s=tuple(
            (dtype, peaks.get(dtype, float, unit="ops_per_s"))
            for dtype in peaks.entries
        ),
        kernels=rates,
        kinds=top.get("device_kinds", tuple[str, ...], ()),
        **memory.values(Device, _MEMORY),
        **top.values(Device, _DEVICE),
    )


def _check_pair(table: CheckedTable, name: str, expected: str) -> None:
    """Refuse a list of another length than two."""
    pair = table.get(name, tuple[int, ...], ())
    table.check(len(pair) in (0, 2), name, list(pair), expected)


def _parse_tiers(top: CheckedTable) -> tuple[Tier, ...]:
    value = top.entries.get("tiers", MISSING)
    if not isinstance(value, list) or not value:
        raise top.fail("tiers", "at least one table [[tiers]]", value)
    tiers: list[Tier] = []
    for i, entries in enumerate(value):
        if not isinstance(entries, Mapping):
            raise top.fail(f"tiers[{i}]", "a table", entries, "write [[tiers]].")
        within = tiers[-1].size if tiers else 1
        table = replace(top, entries=entries, path=f"tiers[{i}]")
        tiers.append(_parse_tier(table, within, is_last=i == len(value) - 1))
    return tuple(tiers)


def _parse_tier(table: CheckedTable, within: int | None, *, is_last: bool) -> Tier:
    """Parse a tier whose domains contain groups of `within` devices."""
    tier = table.record(Tier)
    size, dims, rank = tier.size, tier.dims, tier.rank or len(tier.dims)
    if tier.topology == "torus":
        if not rank:
            raise table.fail("dims", "a torus's dims, as [4, 4]")
        if dims and rank != len(dims):
            raise table.fail("rank", f"{len(dims)}, the number of `dims`", rank)
        if dims and within:
            devices = within * math.prod(dims)
            if size not in (None, devices):
                raise table.fail("size", f"{devices}, which `dims` hold", size)
            size = devices
        if tier.largest is not None:
            raise table.fail("largest", "nothing, as a torus says `longest_side`",
                             tier.largest, "remove it.")  # fmt: skip
    else:
        for name in _TORUS_ONLY:
            if name in table.entries:
                raise table.fail(name, f'nothing, as topology = "{tier.topology}"',
                                 table.entries[name], "remove it.")  # fmt: skip
    if size is None and not is_last:
        raise table.fail("size", "a number of devices (only the last tier may be"
                         " unlimited)")  # fmt: skip
    if size and within and (size < within or size % within):
        raise table.fail("size", f"a multiple of {within}, the size of the tier"
                         " within", size)  # fmt: skip
    least = size or 2
    if tier.largest is not None and tier.largest < least:
        raise table.fail("largest", f"a whole number >= {least}", tier.largest)
    return replace(tier, size=size, rank=rank)
