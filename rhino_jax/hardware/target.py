"""Target: what a device can do, and which links join devices.

A target's links are *tiers*, from the fastest outwards: the first joins devices to
groups, the next joins those groups to larger ones, and so on. A tier is a switch
(any device reaches any other at full rate) or a torus (neighbours are linked).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rhino_jax.hardware.lowering import LoweringPolicy


UNLIMITED_BYTES = 2**62
"""Stands for memory without bounds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One device, as JAX counts them.

    Attributes:
      peak_flops_per_s: (dtype, floating-point operations per second of a matmul).
      matmul_efficiency: share of that peak that a large matmul reaches, in (0, 1].
      hbm_bytes: memory that XLA can use.
      reserve_share: share of a memory budget that plans leave free: by so much compiled
        programs were measured to hold more than predicted, in [0, 1).
      hbm_bytes_per_s: peak bandwidth of that memory.
      memory_efficiency: share of that bandwidth that streaming reaches, in (0, 1].
      launch_s: fixed seconds that every kernel costs.
      overlap_share: collectives hide behind compute for at most this share of the
        compute's time, all of them together, in [0, 1].
      hidable_share: of a collective beside which there is other work, the share that
        the compiler lets run beside it, in [0, 1].
      free_share: the same of one that nothing waits for from the step's start on, or
        to its end, as of weights and their gradients; None: `hidable_share`.
      fuses_matmuls: whether the compiler computes elementwise operands of a matmul,
        and what is elementwise in its result, inside of it, without memory.
      hoists_conversions: whether the compiler converts what a loop scans over before
        the loop, for all slices at once.
      gathers_by_axis, scatters_by_axis, combines: see `LoweringPolicy`.
      calls_cudnn: whether convolutions are calls of cuDNN, with nothing fused into
        them: gradients by the input where the kernel is reversed right before them (see
        `rhino_jax.model.reversals`), and values with channels last (see
        `rhino_jax.model.channels_last`).
      parts_columns: whether what reads a sum over other dims than the last is computed
        by another kernel than that sum, and reads what was summed again (a batch
        norm); sums over rows are computed in one with what reads them (a softmax).
      defers_gradients: whether the compiler leaves matmuls of weights' gradients to the
        end of the step, and holds what they read, unless they are ordered (see
        `rhino_jax.passes.remat`).
      masks_groups: whether the compiler multiplies all rows of a product of ragged
        groups by the matrix of every group, with the operands masked to the group's
        rows in memory (see `rhino_jax.analysis.masked_groups`).
      host_bytes_per_s: bandwidth of its link to the host's memory, one direction; None
        where it is not known, or the compiler puts nothing there.
      recomputes: names of costly elementwise ops that the compiler computes again in
        the backward pass rather than keep their results; "tanh.float32" of one element
        type alone.
      tile: rows and lanes of the tiles in which memory holds arrays, padded to whole
        ones (see `rhino_jax.cost.tiles`); empty: it holds none.
      systolic_array: rows, and columns, of the array that multiplies matrices (see
        `rhino_jax.cost.systolic`); 0: there is none, or its padding is not known.
      clock_hz: cycles per second, for compilers that estimate cycles; None for those
        that do not.
      kinds: `jax.Device.device_kind` of such devices.
      price_per_hour: what one costs, in US dollars or what the file's user counts in;
        None where it is not known. Plans do not depend on it.
    """

    peak_flops_per_s: tuple[tuple[str, float], ...]
    hbm_bytes: int
    hbm_bytes_per_s: float
    reserve_share: float = 0.0
    matmul_efficiency: float = 1.0
    memory_efficiency: float = 1.0
    launch_s: float = 0.0
    overlap_share: float = 0.0
    hidable_share: float = 1.0
    free_share: float | None = None
    fuses_matmuls: bool = False
    hoists_conversions: bool = False
    gathers_by_axis: bool = False
    scatters_by_axis: bool = False
    combines: bool = False
    calls_cudnn: bool = False
    parts_columns: bool = False
    defers_gradients: bool = False
    masks_groups: bool = False
    host_bytes_per_s: float | None = None
    recomputes: tuple[str, ...] = ()
    tile: tuple[int, ...] = ()
    systolic_array: int = 0
    clock_hz: float | None = None
    kinds: tuple[str, ...] = ()
    price_per_hour: float | None = field(default=None, repr=False)

    @property
    def lowering(self) -> LoweringPolicy:
        """What its compiler makes of shardings, every waypoint annotated."""
        return LoweringPolicy(
            gathers_by_axis=self.gathers_by_axis,
            scatters_by_axis=self.scatters_by_axis,
            combines=self.combines,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """One kind of link.

    Attributes:
      name: as "ici", "nvlink", "network".
      topology: "switch", "torus", or "barrier" (threads of one process).
      alpha_s: seconds of latency of one step between neighbours, or one message.
        BARRIER: of each thread that meets the others.
      bytes_per_s: bytes per second that one device sends. TORUS: the same, over one
        link in one direction; a device has two links per torus dim.
      size: devices within reach, counted from the innermost tier; None: unlimited.
      rank: TORUS: number of torus dims.
      dims: TORUS: the torus, in groups of the tier within, major first. Empty: as
        near to a cube as the number of devices allows.
      wrap_multiple: TORUS: a dim of more than two wraps around if its size is a
        multiple of this; 0: none does.
      wrap_needs_all: TORUS: no dim wraps around unless the sizes of all allow it.
      side_step: TORUS: of what is built, sides longer than 1 are multiples of this.
      longest_side: TORUS: of what is built; None: unlimited.
      largest: SWITCH: devices of the largest domain that is built; None: `size`.
    """

    name: str
    alpha_s: float
    bytes_per_s: float
    topology: str = "switch"
    size: int | None = None
    rank: int = 0
    dims: tuple[int, ...] = ()
    wrap_multiple: int = 1
    wrap_needs_all: bool = False
    side_step: int = 1
    longest_side: int | None = None
    largest: int | None = None

    def is_built(self, dims: tuple[int, ...]) -> bool:
        """Whether there is a torus of these dims."""
        longest = self.longest_side or max(dims, default=1)
        return all(d == 1 or (d % self.side_step == 0 and d <= longest) for d in dims)

    def wraps(self, dims: tuple[int, ...]) -> tuple[bool, ...]:
        """Which of the dims of a torus wrap around."""
        if self.wrap_multiple == 0:
            return (False,) * len(dims)
        fits = [d % self.wrap_multiple == 0 for d in dims]
        if self.wrap_needs_all and not all(fits):
            return (False,) * len(dims)
        # A second link to the same neighbour makes no ring.
        return tuple(fit and d > 2 for fit, d in zip(fits, dims, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisLink:
    """The link that one named mesh axis lies on, stated instead of derived.

    Attributes:
      alpha_s: seconds of latency of one step.
      bytes_per_s: bytes per second that one device sends along the axis.
      topology: "ring", "line", "switch" or "barrier".
    """

    alpha_s: float
    bytes_per_s: float
    topology: str = "switch"


# Where a type is not listed, the type at whose rate it is computed.
_COMPUTED_AS = {
    "float64": "float32",
    "float16": "bfloat16",
    "bfloat16": "float32",
    "float8": "bfloat16",
    "int8": "bfloat16",
    "complex128": "float64",
    "complex64": "float32",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The hardware that a plan is made for.

    Attributes:
      name: as in `configs/hardware`, with the topology if it was given.
      device: one device.
      tiers: links, innermost first. Empty only where `links` are given.
      links: links of mesh axes by name; where given, `tiers` are not used.
      num_devices: number of devices, where the topology fixes it.
    """

    name: str
    device: Device
    tiers: tuple[Tier, ...] = ()
    links: tuple[tuple[str, AxisLink], ...] = ()
    num_devices: int | None = None

    @property
    def hbm_bytes(self) -> int:
        """Memory of one device that XLA can use."""
        return self.device.hbm_bytes

    @property
    def hbm_bytes_per_s(self) -> float:
        """Peak memory bandwidth of one device."""
        return self.device.hbm_bytes_per_s

    @property
    def matmul_efficiency(self) -> float:
        """Share of the peak that a large matmul reaches."""
        return self.device.matmul_efficiency

    @property
    def memory_efficiency(self) -> float:
        """Share of the peak bandwidth that streaming reaches."""
        return self.device.memory_efficiency

    @property
    def launch_s(self) -> float:
        """Fixed seconds that every kernel costs."""
        return self.device.launch_s

    @property
    def overlap_share(self) -> float:
        """Share of compute's time behind which collectives can hide."""
        return self.device.overlap_share

    @property
    def hidable_share(self) -> float:
        """Share of a collective that can hide where there is other work."""
        return self.device.hidable_share

    @property
    def free_share(self) -> float:
        """The same where nothing waits from the step's start on, or to its end."""
        share = self.device.free_share
        return self.device.hidable_share if share is None else share

    @property
    def clock_hz(self) -> float | None:
        """Cycles per second of a device whose compiler estimates cycles."""
        return self.device.clock_hz

    def peak_flops_per_s(self, dtype: str) -> float:
        """Peak floating-point operations per second of a matmul.

        A type that the device does not list runs at the rate of the type that it
        would be computed in: every float8 as float8, else bfloat16; integers of at
        most 8 bits as int8; wider integers and booleans as float32.
        """
        peaks = dict(self.device.peak_flops_per_s)
        name = _canonical(dtype)
        seen = set()
        while name not in peaks and name in _COMPUTED_AS and name not in seen:
            seen.add(name)
            name = _COMPUTED_AS[name]
        return peaks.get(name, min(peaks.values()))

    def replace(self, **changes: Any) -> Target:
        """A copy with other figures.

        Args:
          **changes: attributes of `Target` or of `Device`, as `hbm_bytes=8 * 2**30`.
        """
        of_device = {f.name for f in dataclasses.fields(Device)} & changes.keys()
        device = dataclasses.replace(
            changes.pop("device", self.device),
            **{name: changes.pop(name) for name in of_device},
        )
        return dataclasses.replace(self, device=device, **changes)

    @classmethod
    def pure_communication(
        cls,
        axes: Mapping[str, tuple[float, float]],
        *,
        hbm_bytes: int = UNLIMITED_BYTES,
        name: str = "pure_communication",
    ) -> Target:
        """A target on which only communication takes time.

        Args:
          axes: mesh axis name → (alpha_s, bytes_per_s).
          hbm_bytes: memory of one device; unlimited where not given.
          name: name of the target.
        Raises:
          ValueError: a negative latency, or a bandwidth that is not positive.
        """
        for axis, (alpha_s, bytes_per_s) in axes.items():
            if not (alpha_s >= 0 and bytes_per_s > 0):
                raise ValueError(
                    f"axis {axis!r}: alpha_s must be at least 0 and bytes_per_s"
                    f" positive, got {alpha_s} and {bytes_per_s}"
                )
        return cls(
            name=name,
            device=Device(
                peak_flops_per_s=(("float32", math.inf),),
                hbm_bytes=hbm_bytes,
                hbm_bytes_per_s=math.inf,
            ),
            links=tuple(
                (axis, AxisLink(alpha_s=a, bytes_per_s=b))
                for axis, (a, b) in axes.items()
            ),
        )


def _canonical(dtype: str) -> str:
    """The name of a family of types, as hardware files use it."""
    if dtype.startswith("float8"):
        return "float8"
    if dtype in ("int8", "uint8", "int4", "uint4", "int2", "uint2"):
        return "int8"
    if dtype.startswith(("float", "bfloat", "complex")):
        return dtype
    return "float32"
