"""Target: the capabilities of a device, and the links that join devices.

A target's links are *tiers*, from the innermost outwards: the first joins devices into
groups, the next joins those groups into larger ones, and so on. A tier is a switch (any
device reaches any other at full rate) or a torus (neighbours are linked).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rhino_jax.hardware.lowering import LoweringPolicy


UNLIMITED_BYTES = 2**62
"""A memory size that stands for unlimited memory."""


_PLATFORMS = (("TPU", "tpu"), ("NVIDIA", "cuda"), ("Tesla", "cuda"), ("cpu", "cpu"))
"""Start of `jax.Device.device_kind` → platform that JAX lowers for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRates:
    """Rates of kernels that are neither large matmuls nor one pass over memory.

    Attributes:
      vector_ops_per_s: operations per second on vector units, of 4-byte elements; `inf`
        where their time is not modelled.
      special_ops: operations that a special function (exp, tanh, a division) takes at
        most.
      reduce_ops: operations that one element of a reduction takes.
      factor_flops_per_s: operations per second of the library's factorisations and
        triangular solves; `inf` where they are not modelled.
      sort_passes: reads and writes of a sort, per byte of its keys.
      fft_passes: reads and writes of a Fourier transform, per dim.
      conv_tile: input and output channels to whose multiples the library's convolutions
        pad theirs; empty: they do not.
      conv_s: seconds that a convolution of the library takes besides, for its other
        kernels and because its last tiles leave the device idle.
      conv_gradient_share: rate of the gradient of a float32 convolution by its kernel,
        as a share of that of others.
    """

    vector_ops_per_s: float = math.inf
    special_ops: float = math.inf
    reduce_ops: float = 1.0
    factor_flops_per_s: float = math.inf
    sort_passes: float = 0.0
    fft_passes: float = 0.0
    conv_tile: tuple[int, ...] = ()
    conv_s: float = 0.0
    conv_gradient_share: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One device, as JAX counts them.

    Attributes:
      peak_flops_per_s: (dtype, floating-point operations per second of a matmul).
      matmul_efficiency: share of that peak that a large matmul reaches, in (0, 1].
      hbm_bytes: memory that XLA can use.
      reserve_share: share of a memory budget that plans leave unused, in [0, 1):
        compiled programs were measured to use that much more memory than predicted.
      hbm_bytes_per_s: peak bandwidth of that memory.
      memory_efficiency: share of that bandwidth that streaming reaches, in (0, 1].
      on_chip_bytes: memory on the chip in which the compiler keeps values from one
        kernel to others (see `rhino_jax.analysis.on_chip`); 0: none.
      on_chip_bytes_per_s: bandwidth at which vector units read values there.
      on_chip_peak_bytes_per_s: bandwidth at which kernels write them, and at which
        matrix units read them; None: the same.
      loops_on_chip: whether such values may be there from one trip of a loop to the
        next.
      launch_s: fixed seconds that every kernel costs.
      overlap_share: upper bound on the time of all hidden collectives together, as a
        share of the compute time, in [0, 1].
      hidable_share: share of a collective that the compiler can overlap with
        independent compute, in [0, 1].
      free_share: `hidable_share` of collectives that can start at the step's beginning
        or last to its end, as those of weights and of their gradients; None:
        `hidable_share`.
      awaits_sums: whether nothing runs beside reductions of partial sums.
      fuses_matmuls: whether the compiler fuses elementwise producers of a matmul's
        operands and elementwise consumers of its result into the matmul, so that they
        use no memory.
      hoists_conversions: whether the compiler hoists dtype conversions of a loop's
        stacked inputs out of the loop, and converts all slices at once.
      gathers_by_axis, scatters_by_axis, combines, reassociates, rounds_products,
        splits_complex: see `LoweringPolicy`.
      combines_levels: whether the compiler combines reductions of which none depends on
        another, from the program's end on (see `rhino_jax.analysis.reduction_levels`).
      calls_cudnn: whether convolutions are calls of cuDNN, with nothing fused into
        them: also gradients by the input if the kernel is reversed right before them
        (see `rhino_jax.model.gpu_kernels`), and values with channels last (see
        `rhino_jax.model.channels_last`). A dilated kernel is padded with zeros, which
        the call multiplies with (openxla/xla, conv_padding_legalization.cc,
        `MaybePaddedKernel`; a WaveNet compiles to 22 times its FLOPs for 8 H100).
      parts_columns: whether a sum over other dims than the last and its readers are
        separate kernels, of which the second reads the summed operand again (a batch
        norm); of sums over rows those of `analysis.row_kernels`, of up to
        `Observed.longest_sum` elements, are fused with their readers (a softmax).
      defers_gradients: whether the compiler schedules the matmuls of weight gradients
        at the end of the step, and keeps their operands live until then, unless they
        are ordered (see `rhino_jax.passes.remat`).
      masks_groups: whether the compiler multiplies all rows of a product of ragged
        groups by the matrix of every group, and materializes the operands masked to the
        group's rows (see `rhino_jax.analysis.temporaries`).
      tiles_groups: whether such products run in a kernel of rhino's instead, which
        multiplies the rows of each group alone (see `rhino_jax.runtime.grouped`): it
        is cheaper at every shape (tests/analysis/test_temporaries.py).
      sinks_broadcasts: whether the compiler broadcasts in a loop's body what the body
        reads broadcast, instead of before the loop: constants that mask attention's
        scores then use no memory.
      copies_stacks: whether the compiler fills the stack that a loop writes with zeros
        first, and writes it in a kernel of its own per trip, which reads the value or
        what it is computed from; and copies a slice of a stack that a matmul reads, and
        results of branches back into donated arguments (see `analysis.in_place`).
      fuses_rotations: whether the compiler computes rotations in the fusions of their
        readers, instead of storing them.
      fuses_by_bytes: whether the compiler fuses by the bytes that this saves: look-ups
        compute the elements that they read, and of a chain of elementwise ops with
        readers in several kernels the narrowest value is stored.
      loops_windows: whether gathers and scatters of windows are loops over the windows
        (see `rhino_jax.model.tpu_kernels`).
      sparse_cores: whether SparseCores look rows up: from HBM, to HBM.
      host_bytes_per_s: bandwidth of a device's link to host memory, one direction; None
        if it is unknown, or the compiler does not support host offload.
      recomputes: names of costly elementwise ops that the compiler recomputes in the
        backward pass instead of saving their results; "tanh.float32" for one element
        type alone.
      tile: rows and lanes of the tiles to which arrays in memory are padded (see
        `rhino_jax.cost.compute`); empty: no tiles.
      systolic_array: rows, and columns, of the matrix unit's systolic array (see
        `rhino_jax.cost.compute`); 0: none, or its padding is unknown.
      kernels: rates of other kernels than large matmuls and streaming.
      clock_hz: cycles per second, for compilers that estimate cycles; None for others.
      kinds: values of `jax.Device.device_kind` for this device.
      price_per_hour: price of one device for an hour, in US dollars or the currency
        that the file's user chose; None if unknown. Plans do not depend on it.
    """

    peak_flops_per_s: tuple[tuple[str, float], ...]
    hbm_bytes: int
    hbm_bytes_per_s: float
    reserve_share: float = 0.0
    matmul_efficiency: float = 1.0
    memory_efficiency: float = 1.0
    on_chip_bytes: int = 0
    on_chip_bytes_per_s: float = math.inf
    on_chip_peak_bytes_per_s: float | None = None
    loops_on_chip: bool = False
    launch_s: float = 0.0
    overlap_share: float = 0.0
    hidable_share: float = 1.0
    free_share: float | None = None
    fuses_matmuls: bool = False
    hoists_conversions: bool = False
    gathers_by_axis: bool = False
    scatters_by_axis: bool = False
    combines: bool = False
    reassociates: bool = False
    combines_levels: bool = False
    awaits_sums: bool = False
    rounds_products: bool = False
    calls_cudnn: bool = False
    parts_columns: bool = False
    defers_gradients: bool = False
    masks_groups: bool = False
    tiles_groups: bool = False
    sinks_broadcasts: bool = False
    copies_stacks: bool = False
    fuses_rotations: bool = False
    fuses_by_bytes: bool = False
    loops_windows: bool = False
    splits_complex: bool = False
    sparse_cores: bool = False
    host_bytes_per_s: float | None = None
    recomputes: tuple[str, ...] = ()
    tile: tuple[int, ...] = ()
    systolic_array: int = 0
    kernels: KernelRates = KernelRates()
    clock_hz: float | None = None
    kinds: tuple[str, ...] = ()
    price_per_hour: float | None = field(default=None, repr=False)

    @property
    def platform(self) -> str | None:
        """JAX's name of the platform that lowers for this device; None if unknown."""
        for kind in self.kinds:
            for start, platform in _PLATFORMS:
                if kind.startswith(start):
                    return platform
        return None

    @property
    def inlining(self) -> dict[str, bool]:
        """Keywords of `analysis.inline_regions`: which ops fuse that not all compilers
        fuse. XLA:TPU, which loops over windows, fuses nothing into scatters but into
        unsorted ones of zeros (HLO of v5e, libtpu 0.0.52)."""
        return {
            "fuses_rotations": self.fuses_rotations,
            "fuses_scatters": not self.loops_windows,
        }

    @property
    def stack_passes(self) -> int:
        """Number of writes and reads of a value because a loop stacks it: of the value
        and, where stacks are copied, of the zeros and the copy."""
        return 4 if self.copies_stacks else 2

    @property
    def lowering(self) -> LoweringPolicy:
        """The compiler's lowering of shardings, with every waypoint annotated."""
        return LoweringPolicy(
            gathers_by_axis=self.gathers_by_axis,
            scatters_by_axis=self.scatters_by_axis,
            combines=self.combines,
            reassociates=self.reassociates,
            rounds_products=self.rounds_products,
            splits_complex=self.splits_complex,
            tiles_groups=self.tiles_groups,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """One kind of link.

    Attributes:
      name: name of the link, as "ici", "nvlink", "network".
      topology: "switch", "torus", or "barrier" (threads of one process).
      alpha_s: seconds of latency of one step between neighbours, or one message.
        BARRIER: of each thread that joins the barrier.
      bytes_per_s: bytes per second that one device sends. TORUS: over one link in one
        direction; a device has two links per torus dim.
      size: number of devices within reach, all inner tiers included; None: unlimited.
      rank: TORUS: number of torus dims.
      dims: TORUS: the torus, in groups of the next inner tier, major first. Empty: as
        near to a cube as the number of devices allows.
      wrap_multiple: TORUS: a dim of more than two wraps around if its size is a
        multiple of this; 0: none does.
      wrap_needs_all: TORUS: no dim wraps around unless the sizes of all allow it.
      side_step: TORUS: sides longer than 1 of tori that exist as products are multiples
        of this.
      longest_side: TORUS: longest side of tori that exist as products; None: unlimited.
      largest: SWITCH: number of devices of the largest domain that exists as a product;
        None: `size`.
    """

    name: str
    alpha_s: float
    bytes_per_s: float
    topology: Literal["switch", "barrier", "torus"] = "switch"
    size: int | None = None
    rank: int = 0
    dims: tuple[int, ...] = ()
    wrap_multiple: int = 1
    wrap_needs_all: bool = False
    side_step: int = 1
    longest_side: int | None = None
    largest: int | None = None

    def is_built(self, dims: tuple[int, ...]) -> bool:
        """Whether a torus of these dims exists as a product."""
        longest = self.longest_side or max(dims, default=1)
        return all(d == 1 or (d % self.side_step == 0 and d <= longest) for d in dims)

    def wraps(self, dims: tuple[int, ...]) -> tuple[bool, ...]:
        """Return for every dim of a torus whether it wraps around."""
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
    topology: Literal["ring", "line", "switch", "barrier"] = "switch"


# A type that a device does not list → the type at whose rate it is computed.
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
      name: name in `configs/hardware`, with the topology if it was given.
      device: rates and memory of one device.
      tiers: links, innermost first. Empty only if `links` are given.
      links: (mesh axis name, link) of axes whose links are stated; if given, `tiers`
        are not used.
      num_devices: number of devices, if the topology fixes it; else None.
    """

    name: str
    device: Device
    tiers: tuple[Tier, ...] = ()
    links: tuple[tuple[str, AxisLink], ...] = ()
    num_devices: int | None = None

    @property
    def torus(self) -> Tier | None:
        """The tier that is a torus, or None."""
        return next((t for t in self.tiers if t.topology == "torus"), None)

    def peak_flops_per_s(self, dtype: str) -> float:
        """Return the peak floating-point operations per second of a matmul.

        A type that the device does not list runs at the rate of the type that it would
        be computed in: every float8 as float8, else bfloat16; integers of at most 8
        bits as int8; wider integers and booleans as float32.
        """
        peaks = dict(self.device.peak_flops_per_s)
        name = _canonical(dtype)
        seen = set()
        while name not in peaks and name in _COMPUTED_AS and name not in seen:
            seen.add(name)
            name = _COMPUTED_AS[name]
        return peaks.get(name, min(peaks.values()))

    def with_slower_links(self, factor: float) -> Target:
        """Return the target with collectives that take `factor` times as long."""

        def slower(link: Any) -> Any:
            return dataclasses.replace(
                link,
                alpha_s=factor * link.alpha_s,
                bytes_per_s=link.bytes_per_s / factor,
            )

        return dataclasses.replace(
            self,
            tiers=tuple(map(slower, self.tiers)),
            links=tuple((name, slower(link)) for name, link in self.links),
        )

    def replace(self, **changes: Any) -> Target:
        """Return a copy with some attributes replaced.

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
        """Return a target on which only communication takes time.

        Args:
          axes: mesh axis name → (alpha_s, bytes_per_s).
          hbm_bytes: memory of one device, in bytes; unlimited by default.
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
    """Return the name of a family of types, as hardware files use it."""
    if dtype.startswith("float8"):
        return "float8"
    if dtype in ("int8", "uint8", "int4", "uint4", "int2", "uint2"):
        return "int8"
    if dtype.startswith(("float", "bfloat", "complex")):
        return dtype
    return "float32"
