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
combines_levels = false             # optional, false; see `Device`
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
adds_vector_ops = false             # optional, false
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

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rhino_jax.errors import HardwareError, nearest
from rhino_jax.hardware.target import AxisLink, Device, KernelRates, Target, Tier


MISSING = object()
"""The value that `fail` gets for a missing key."""


@dataclass(frozen=True, slots=True)
class TomlTable:
    """A table of the file.

    Attributes:
      file: name of the file, for errors.
      path: keys that lead to the table, joined by dots; empty for the whole file.
      entries: its keys and values.
    """

    file: str
    path: str
    entries: Mapping[str, Any]

    def key(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name

    def fail(
        self, name: str, expected: str, got: object, fix: str = ""
    ) -> HardwareError:
        key = self.key(name)
        shown = "nothing" if got is MISSING else repr(got)
        what = "is missing" if got is MISSING else "is not what it must be"
        return HardwareError(
            f"hardware file: `{key}` {what}.",
            where=f"{self.file}, key `{key}`",
            numbers=f"expected {expected}, got {shown}",
            fix=fix or f"set `{key}` to {expected}.",
        )

    def refuse_unknown(self, known: Iterable[str]) -> None:
        known = tuple(known)
        for name, value in self.entries.items():
            if name not in known:
                raise HardwareError(
                    f"hardware file: `{self.key(name)}` is not a known key.",
                    where=f"{self.file}, key `{self.key(name)}`",
                    numbers=f"expected one of {', '.join(known)}, got"
                    f" {name} = {value!r}",
                    fix=f"remove or rename it.{nearest(name, known)}",
                )

    def share(self, name: str, default: float | None, most: float = 1.0) -> float:
        expected = f"a share in [0, {most:g}]"
        return self.number(name, expected, may_be_zero=True, most=most, default=default)

    def number(
        self,
        name: str,
        expected: str,
        *,
        may_be_zero: bool = False,
        most: float = math.inf,
        default: float | None = None,
    ) -> float:
        value = self.entries.get(name, MISSING if default is None else default)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        # Written so that NaN fails.
        if (
            not is_number
            or not (0 <= value <= most)
            or (value == 0 and not may_be_zero)
        ):
            raise self.fail(name, expected, value)
        return float(value)

    def whole(
        self, name: str, *, least: int = 1, default: int | None = None
    ) -> int | None:
        """Return an integer (`5e9` is accepted as one); None if absent, no default."""
        value = self.entries.get(name, default)
        if value is None:
            return None
        is_whole = isinstance(value, int) or (
            isinstance(value, float) and value.is_integer()
        )
        if isinstance(value, bool) or not is_whole or value < least:
            raise self.fail(name, f"a whole number of at least {least}", value)
        return int(value)

    def text(self, name: str, default: str | None = None) -> str:
        value = self.entries.get(name, MISSING if default is None else default)
        if not isinstance(value, str) or not value:
            raise self.fail(name, "a text", value)
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """Return a list of strings, empty if the key is absent."""
        value = self.entries.get(name, [])
        if not isinstance(value, list) or not all(isinstance(x, str) for x in value):
            raise self.fail(name, "a list of texts", value)
        return tuple(value)

    def sizes(self, name: str) -> tuple[int, ...]:
        """Return a list of integers of at least 1, empty if the key is absent."""
        value = self.entries.get(name, [])
        if not isinstance(value, list) or not all(
            isinstance(x, int) and not isinstance(x, bool) and x >= 1 for x in value
        ):
            raise self.fail(name, "a list of whole numbers, as [4, 4]", value)
        return tuple(value)

    def one_of(self, name: str, words: tuple[str, ...], default: str) -> str:
        value = self.entries.get(name, default)
        if value not in words:
            raise self.fail(name, " or ".join(f'"{w}"' for w in words), value)
        return str(value)

    def flag(self, name: str) -> bool:
        """Return a boolean; False if the key is absent."""
        value = self.entries.get(name, False)
        if not isinstance(value, bool):
            raise self.fail(name, "true or false", value)
        return value

    def table(self, name: str) -> TomlTable:
        value = self.entries.get(name, MISSING)
        if not isinstance(value, Mapping):
            raise self.fail(name, "a table", value, f"write [{self.key(name)}].")
        return TomlTable(self.file, self.key(name), value)


_FLAGS = tuple(f.name for f in dataclasses.fields(Device) if f.default is False)
_TOP = (
    "name", "device_kinds", "matmul_efficiency", "memory_efficiency", "launch_s",
    "overlap_share", "hidable_share", "free_share", *_FLAGS, "recomputes", "clock_hz",
    "systolic_array", "price_per_hour", "peak_flops_per_s", "kernels", "memory",
    "tiers", "links",
)  # fmt: skip
_DTYPES = (
    "float64", "float32", "float16", "bfloat16", "float8", "int8", "complex64",
    "complex128",
)  # fmt: skip
_MEMORY = (
    "hbm_bytes", "hbm_bytes_per_s", "on_chip_bytes", "on_chip_bytes_per_s",
    "on_chip_peak_bytes_per_s", "reserve_share", "host_bytes_per_s", "tile",
)  # fmt: skip
_TIER = (
    "name", "topology", "size", "largest", "rank", "dims", "wrap_multiple",
    "wrap_needs_all", "side_step", "longest_side", "alpha_s", "bytes_per_s",
)  # fmt: skip
_TORUS_ONLY = ("rank", "dims", "wrap_multiple", "wrap_needs_all", "side_step",
               "longest_side")  # fmt: skip
_FLAT = ("switch", "barrier")


def parse_target(entries: Mapping[str, Any], *, file: str, name: str) -> Target:
    """Return the target that a hardware file describes.

    Args:
      entries: the file's content, as read from TOML.
      file: name of the file, for errors.
      name: the target's name if the file does not state one.
    Raises:
      HardwareError: a key is missing, unknown, or has a wrong value.
    """
    top = TomlTable(file, "", entries)
    top.refuse_unknown(_TOP)
    device = _parse_device(top)
    has_links = "links" in entries
    return Target(
        name=top.text("name", name),
        device=device,
        tiers=() if has_links and "tiers" not in entries else _parse_tiers(top),
        links=_parse_links(top.table("links")) if has_links else (),
    )


def _parse_device(top: TomlTable) -> Device:
    memory = top.table("memory")
    memory.refuse_unknown(_MEMORY)
    hbm_bytes = memory.whole("hbm_bytes")
    if hbm_bytes is None:
        raise memory.fail("hbm_bytes", "a whole number of bytes", MISSING)
    peaks = top.table("peak_flops_per_s")
    peaks.refuse_unknown(_DTYPES)
    if not peaks.entries:
        raise top.fail("peak_flops_per_s", "at least one type, as float32", {})
    share = "a number above 0 and at most 1"
    return Device(
        peak_flops_per_s=tuple(
            (dtype, peaks.number(dtype, "operations per second, above 0"))
            for dtype in peaks.entries
        ),
        matmul_efficiency=top.number("matmul_efficiency", share, most=1),
        memory_efficiency=top.number("memory_efficiency", share, most=1),
        launch_s=top.number(
            "launch_s", "seconds, at least 0", may_be_zero=True, default=0.0
        ),
        overlap_share=top.share("overlap_share", 0.0),
        hidable_share=top.share("hidable_share", 1.0),
        free_share=(
            top.share("free_share", None) if "free_share" in top.entries else None
        ),
        **{name: top.flag(name) for name in _FLAGS},
        clock_hz=_rate(top, "clock_hz", "cycles"),
        hbm_bytes=hbm_bytes,
        hbm_bytes_per_s=memory.number("hbm_bytes_per_s", "bytes per second, above 0"),
        on_chip_bytes=memory.whole("on_chip_bytes", least=0, default=0) or 0,
        on_chip_bytes_per_s=memory.number(
            "on_chip_bytes_per_s", "bytes per second, above 0", default=math.inf
        ),
        on_chip_peak_bytes_per_s=_rate(memory, "on_chip_peak_bytes_per_s", "bytes"),
        reserve_share=memory.share("reserve_share", 0.0, most=0.9),
        host_bytes_per_s=_rate(memory, "host_bytes_per_s", "bytes"),
        recomputes=top.texts("recomputes"),
        tile=_parse_pair(memory, "tile", "rows and lanes, as [8, 128]"),
        systolic_array=top.whole("systolic_array", least=0, default=0) or 0,
        kernels=_parse_kernels(top.table("kernels"))
        if "kernels" in top.entries
        else (KernelRates()),
        kinds=top.texts("device_kinds"),
        price_per_hour=(
            top.number("price_per_hour", "a price, at least 0", may_be_zero=True)
            if "price_per_hour" in top.entries
            else None
        ),
    )


def _parse_kernels(table: TomlTable) -> KernelRates:
    table.refuse_unknown(tuple(f.name for f in dataclasses.fields(KernelRates)))
    pair = "input and output channels, as [32, 128]"
    return KernelRates(
        vector_ops_per_s=table.number(
            "vector_ops_per_s", "operations per second, above 0", default=math.inf
        ),
        special_ops=table.number(
            "special_ops", "operations, above 0", default=math.inf
        ),
        reduce_ops=table.number("reduce_ops", "operations, above 0", default=1.0),
        adds_vector_ops=table.flag("adds_vector_ops"),
        factor_flops_per_s=table.number(
            "factor_flops_per_s", "operations per second, above 0", default=math.inf
        ),
        sort_passes=table.number(
            "sort_passes", "passes, at least 0", may_be_zero=True, default=0.0
        ),
        fft_passes=table.number(
            "fft_passes", "passes, at least 0", may_be_zero=True, default=0.0
        ),
        conv_tile=_parse_pair(table, "conv_tile", pair),
        conv_s=table.number(
            "conv_s", "seconds, at least 0", may_be_zero=True, default=0.0
        ),
        conv_gradient_share=table.number(
            "conv_gradient_share", "a number above 0 and at most 1", most=1, default=1.0
        ),
    )


def _parse_pair(table: TomlTable, name: str, meaning: str) -> tuple[int, ...]:
    pair = table.sizes(name)
    if pair and len(pair) != 2:
        raise table.fail(name, meaning, list(pair))
    return pair


def _rate(table: TomlTable, name: str, unit: str) -> float | None:
    """Return a rate per second; None if the file does not state it."""
    if name not in table.entries:
        return None
    return table.number(name, f"{unit} per second, above 0")


def _parse_links(links: TomlTable) -> tuple[tuple[str, AxisLink], ...]:
    found = []
    for axis in links.entries:
        link = links.table(axis)
        link.refuse_unknown(("alpha_s", "bytes_per_s", "topology"))
        found.append((axis, AxisLink(
            alpha_s=link.number("alpha_s", "seconds, at least 0", may_be_zero=True),
            bytes_per_s=link.number("bytes_per_s", "bytes per second, above 0"),
            topology=link.one_of("topology", ("ring", "line", *_FLAT), "switch"),
        )))  # fmt: skip
    return tuple(found)


def _parse_tiers(top: TomlTable) -> tuple[Tier, ...]:
    value = top.entries.get("tiers", MISSING)
    if not isinstance(value, list) or not value:
        raise top.fail("tiers", "at least one table [[tiers]]", value)
    tiers: list[Tier] = []
    for i, entries in enumerate(value):
        if not isinstance(entries, Mapping):
            raise top.fail(f"tiers[{i}]", "a table", entries, "write [[tiers]].")
        within = tiers[-1].size if tiers else 1
        table = TomlTable(top.file, f"tiers[{i}]", entries)
        tiers.append(_parse_tier(table, within, is_last=i == len(value) - 1))
    return tuple(tiers)


def _parse_tier(table: TomlTable, within: int | None, *, is_last: bool) -> Tier:
    """Parse a tier whose domains contain groups of `within` devices."""
    table.refuse_unknown(_TIER)
    topology = table.one_of("topology", (*_FLAT, "torus"), "switch")
    if topology in _FLAT:
        for name in _TORUS_ONLY:
            if name in table.entries:
                raise table.fail(name, f'nothing, as topology = "{topology}"',
                                 table.entries[name], "remove it.")  # fmt: skip
    size = table.whole("size", least=2)
    dims = table.sizes("dims")
    rank = table.whole("rank", default=len(dims) or None)
    if topology == "torus":
        if rank is None:
            raise table.fail("dims", "a torus's dims, as [4, 4]", MISSING)
        if dims and rank != len(dims):
            raise table.fail("rank", f"{len(dims)}, the number of `dims`", rank)
        if dims and within:
            devices = within * math.prod(dims)
            if size not in (None, devices):
                raise table.fail("size", f"{devices}, which `dims` hold", size)
            size = devices
    if size is None and not is_last:
        raise table.fail("size", "a number of devices (only the last tier may be"
                         " unlimited)", MISSING)  # fmt: skip
    if size and within and (size < within or size % within):
        raise table.fail("size", f"a multiple of {within}, the size of the tier"
                         " within", size)  # fmt: skip
    largest = table.whole("largest", least=size or 2)
    if largest is not None and topology == "torus":
        raise table.fail("largest", "nothing, as a torus says `longest_side`", largest,
                         "remove it.")  # fmt: skip
    return Tier(
        name=table.text("name"),
        topology=topology,
        size=size,
        rank=rank or 0,
        dims=dims,
        wrap_multiple=table.whole("wrap_multiple", least=0, default=1) or 0,
        wrap_needs_all=table.flag("wrap_needs_all"),
        side_step=table.whole("side_step", default=1) or 1,
        longest_side=table.whole("longest_side"),
        largest=largest,
        alpha_s=table.number("alpha_s", "seconds, at least 0", may_be_zero=True),
        bytes_per_s=table.number("bytes_per_s", "bytes per second, above 0"),
    )
