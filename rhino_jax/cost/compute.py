"""Arithmetic: the time of one op on one device, and the utilisation of a step.

An op takes the larger of arithmetic time and memory time. Source: the roofline model
(Williams, Waterman, Patterson, CACM 2009).

Model FLOPs utilisation (MFU) is the arithmetic that the model itself needs, without
recomputation, over the peak arithmetic of the devices in the time of a step. Source:
Chowdhery et al., "PaLM: Scaling Language Modeling with Pathways" (2022), appendix B.

Padding of shapes: to tiles in memory, and to squares of a systolic array.

On TPU two dims of an array are divided into tiles of 8 rows and 128 lanes, and padded
to whole tiles: f32[8,16,16,32,16] takes 8 times its own bytes with its last dim minor.
The compiler chooses which dims are tiled. The choice here is the one with the least
padding: the compiler's layouts may be worse, none is better.

Source: openxla.org/xla/tiled_layout. Seen in HLO of jax 0.12.0.1, libtpu 0.0.51: tiles
have 1, 2, 4 or 8 rows, as few as hold the dim, and enough to fill 4 bytes of a column;
tiles of vectors have 128, 256, 512 or 1,024 elements.

A TPU's matrix unit multiplies by a square of weights that lies in it. The reduced dim
runs down its side, a free factor of one operand along the other side, and rows of the
other operand stream through. Sides are padded to whole squares; a square that few rows
stream through takes as long as its loading does. Products of two vectors, and products
that sum nothing, are multiplied on the vector units instead. A convolution sums over
the channels of its window's last dim at once; each position of the other dims is a
product of its own, and so is each of a kernel's gradient. An image with fewer positions
than its kernel (the gradient of a patch embedding by the image) exchanges roles with
it: the batch lies in the array, and all positions stream past all taps, also past those
that meet nothing.

Source: Jouppi et al., "In-Datacenter Performance Analysis of a Tensor Processing Unit"
(ISCA 2017), section 2. Against XLA:TPU's estimates of convolutions (libtpu 0.0.52):
`pytest -m compile_only tests/cost/test_systolic.py`.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from rhino_jax.hardware.lowering import OBSERVED
from rhino_jax.hardware.target import KernelRates, Target
from rhino_jax.ir.factor import FactorKind, Rule
from rhino_jax.ir.program import Program
from rhino_jax.ir.traits import OWN_KERNEL, Library


def op_s(
    target: Target,
    flops: np.ndarray,
    traffic_bytes: np.ndarray,
    dtype: str,
    vector_ops: np.ndarray | float = 0.0,
    library: Library = OWN_KERNEL,
) -> np.ndarray:
    """Return the seconds of one op, for each of its strategies.

    Args:
      target: the hardware.
      flops: floating-point operations on this device, [strategies].
      traffic_bytes: bytes read from and written to memory on this device, [strategies].
      dtype: element type of the arithmetic's operands.
      vector_ops: operations on vector units, [strategies], of 4-byte elements; of a
        factorisation all its operations.
      library: the algorithm of a device library that the op calls.
    """
    device, kernels = target.device, target.device.kernels
    arithmetic_s = flops / (target.peak_flops_per_s(dtype) * device.matmul_efficiency)
    passes = {"sorting": kernels.sort_passes, "fourier": kernels.fft_passes}
    traffic_s = traffic_bytes / (device.hbm_bytes_per_s * device.memory_efficiency)
    traffic_s *= max(1.0, passes.get(library.name, 1.0) * library.passes)
    is_factor = library.name == "factoring"
    rate = kernels.factor_flops_per_s if is_factor else kernels.vector_ops_per_s
    return np.maximum(np.maximum(arithmetic_s, traffic_s), vector_ops / rate)


def traffic_s(target: Target, traffic_bytes: np.ndarray) -> np.ndarray:
    """Return the seconds of an op that only moves bytes to and from memory, for each of
    its strategies.

    Args: as in `op_s`.
    """
    return op_s(target, 0.0 * traffic_bytes, traffic_bytes, "float32")


@functools.lru_cache(maxsize=1 << 14)
def convolution_work(
    kernels: KernelRates,
    inputs: int,
    outputs: int,
    groups: int,
    dtype: str,
    is_gradient: bool,
) -> float:
    """Return how many times its own arithmetic a convolution of a library takes.

    The matrices that it multiplies have the input channels of a group along the summed
    dim, the output channels along the other, and are padded to whole tiles; as many
    groups as are best share one, with zeros off the diagonal.

    Args:
      kernels: the library's rates.
      inputs, outputs: channels of a group.
      groups: number of groups.
      dtype: element type of the operands.
      is_gradient: whether it is the gradient of a convolution by its kernel.
    """
    slower = kernels.conv_gradient_share if is_gradient and dtype == "float32" else 1.0
    if not kernels.conv_tile or not inputs * outputs * groups:
        return 1.0 / slower
    summed, free = kernels.conv_tile
    joined = [1 << i for i in range(groups.bit_length())]
    paddings = [
        m * padding(groups, m) * padding(m * inputs, summed)
        * padding(m * outputs, free)
        for m in joined
    ]  # fmt: skip
    return min(paddings) / slower


@dataclass(frozen=True, slots=True)
class ModelFlops:
    """The arithmetic of a program as its user wrote it, over all devices.

    Attributes:
      flops: floating-point operations of matrix products and convolutions in a step,
        without those that `jax.checkpoint` recomputes.
      at_peak_s: seconds of one device for them at the peak rate of their element types.
    """

    flops: float = 0.0
    at_peak_s: float = 0.0


def model_flops(program: Program, target: Target) -> ModelFlops:
    """Return the model FLOPs of a program as its user wrote it."""
    flops = at_peak_s = 0.0
    for op, runs in program.walk():
        if not op.traits.is_contraction or op.call is not None:
            continue
        if op.source.is_recomputed:
            continue
        dtype = program.values[op.operands[0]].dtype
        flops += runs * op.flops
        at_peak_s += runs * op.flops / target.peak_flops_per_s(dtype)
    return ModelFlops(flops, at_peak_s)


@functools.lru_cache(maxsize=1 << 16)
def tile_padding(
    shape: tuple[int, ...],
    item_bytes: int,
    tile: tuple[int, ...],
    off_lanes: tuple[int, ...] = (),
) -> float:
    """Return the ratio of an array's padded size to its own size.

    Args:
      shape: shape of the shard on one device.
      item_bytes: bytes of an element.
      tile: rows and lanes of a tile; empty where memory has no tiles.
      off_lanes: dims that may not be the minor one (on lanes), unless all dims are
        listed.
    """
    if not tile or not shape or 0 in shape:
        return 1.0
    rows, lanes = tile
    if len(shape) == 1:
        # A vector fills a tile row by row.
        needed = -(-shape[0] // lanes)
        return padding(shape[0], lanes * min(rows, _power(needed)))
    packed = max(1, 4 // item_bytes)
    across = [padding(d, lanes) for d in shape]
    down = [padding(d, max(packed, min(rows, _power(d)))) for d in shape]
    minor = [i for i in range(len(shape)) if i not in off_lanes] or range(len(shape))
    return min(across[i] * down[j] for i in minor for j in range(len(shape)) if i != j)


def padding(size: Any, multiple: int) -> Any:
    """Return the ratio of sizes padded to a multiple to the sizes themselves."""
    return -(-size // multiple) * multiple / size


def _power(size: int) -> int:
    """Return the smallest power of two that is at least `size`."""
    return 1 << (size - 1).bit_length()


@dataclass(frozen=True, slots=True)
class _Roles:
    """Roles of a product's factors, by position.

    Attributes:
      summed: reducing factors that are summed at once.
      channels: reducing factors that are no positions of windows.
      taps: positions of a window that is not summed at once.
      left: parallel factors of the first operand alone.
      right: factors of the second operand alone.
      positions: positions of convolution windows.
    """

    summed: tuple[int, ...]
    channels: tuple[int, ...]
    taps: tuple[int, ...]
    left: tuple[int, ...]
    right: tuple[int, ...]
    positions: tuple[int, ...]


def array_paddings(
    rule: Rule, pieces: np.ndarray, side: int, exchanged_taps: float = 0.0
) -> np.ndarray:
    """Return by how much padding multiplies the arithmetic of a binary product.

    Args:
      rule: the op's rule.
      pieces: [ways, factors], number of shards of each factor.
      side: rows, and columns, of the systolic array; 0: there is none.
      exchanged_taps: see `Traits`.
    Returns:
      [ways], at least 1.
    """
    sizes = np.array([f.size for f in rule.factors])
    if not side or not sizes.all():
        return np.ones(len(pieces))
    shards = -(-sizes // pieces)
    roles = _roles(rule)
    left, right, summed, positions = (
        shards[:, list(factors)].prod(1)
        for factors in (roles.left, roles.right, roles.summed, roles.positions)
    )
    if exchanged_taps:
        channels = shards[:, list(roles.channels)].prod(1)
        return exchanged_taps * padding(channels, side) * padding(left, side)
    rows = OBSERVED.least_rows * side
    taps = shards[:, list(roles.taps)].prod(1)
    # If the weights lie in the array, window positions stream past them as rows; if
    # the images do, each position is a product of its own. A window with more taps
    # than positions is an image: its few positions are those of a kernel.
    is_kernel = (taps > positions) & (left >= OBSERVED.least_channels)
    streamed = np.where(is_kernel, 1, positions)
    along_right = padding(right, side) * np.maximum(1.0, rows / (left * streamed))
    along_left = padding(left, side) * np.maximum(1.0, rows / right)
    padded = padding(summed, side) * np.minimum(along_right, along_left)
    is_vector = (positions == 1) & ((summed == 1) | (left * right == 1))
    return np.where(is_vector, 1.0, padded)


@functools.cache
def _roles(rule: Rule) -> _Roles:
    taken = [{f for dim in layout for f in dim} for layout in rule.operands[:2]]
    made = {f for layout in rule.results for dim in layout for f in dim}
    summed, left, right, positions = [], [], [], []
    for f, factor in enumerate(rule.factors):
        in_left, in_right = f in taken[0], f in taken[1]
        if f not in made:
            # A window's input positions have no role: its taps and results do.
            if in_right:
                summed.append(f)
        elif in_left and in_right:
            continue
        elif in_right:
            right.append(f)
        elif in_left and factor.kind in (FactorKind.PARALLEL, FactorKind.INDEX):
            left.append(f)
        else:
            positions.append(f)
    taps = [f for f in summed if rule.factors[f].kind in _WINDOWS]
    # Of few channels, and in groups, all taps are taken to be summed at once.
    channels = [f for f in summed if f not in taps]
    num_channels = math.prod(rule.factors[f].size for f in channels)
    if num_channels < OBSERVED.least_channels or taken[0] & taken[1] & made:
        taps = []
    summed = [f for f in summed if f not in taps[:-1]]
    return _Roles(*map(tuple, (summed, channels, taps, left, right, positions)))


_WINDOWS = FactorKind.HALO, FactorKind.WHOLE
