"""Time and wire bytes of collectives.

All kinds are priced as latency plus bytes over bandwidth. `local_bytes` is always
the larger side of what one device holds: the result of an all-gather, the operand
of a reduce-scatter, the buffer of the others.

Source: ring algorithms as in Thakur, Rabenseifner, Gropp, "Optimization of
Collective Communication Operations in MPICH" (IJHPCA 2005), section 4; all-to-all
on a ring by its bisection (JAX scaling book, "Sharded matrices", all-to-all).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from rhino_jax.hardware.mesh import Axis


ALL_REDUCE = "all-reduce"
ALL_GATHER = "all-gather"
REDUCE_SCATTER = "reduce-scatter"
ALL_TO_ALL = "all-to-all"
PERMUTE = "collective-permute"


def wire_bytes(kind: str, local_bytes: float, size: int) -> float:
    """Bytes that one of `size` devices puts on the wire for one collective."""
    if size <= 1:
        return 0.0
    if kind == PERMUTE:
        return local_bytes
    share = (size - 1) / size
    return local_bytes * (2 * share if kind == ALL_REDUCE else share)


def collective_s(kind: str, local_bytes: float, axes: Sequence[Axis]) -> float:
    """Seconds of one collective over the product of `axes`.

    Several axes are taken one after the other, slowest links with the smallest
    pieces. Monotone in `local_bytes` and in every axis size.

    Args:
      kind: one of this module's constants.
      local_bytes: bytes on one device, see the module's text.
      axes: mesh axes that take part.
    Returns:
      Seconds, 0 where there is nothing to do.
    """
    axes = [a for a in axes if a.size > 1]
    if not axes:
        return 0.0
    if all(a.topology == "barrier" for a in axes):
        # All threads meet once, whatever they then copy.
        meeting_s = max(a.alpha_s for a in axes) * math.prod(a.size for a in axes)
        copying = [replace(a, alpha_s=0.0, topology="switch") for a in axes]
        return meeting_s + collective_s(kind, local_bytes, copying)
    if kind == PERMUTE:
        slow = min(axes, key=lambda a: a.bytes_per_s)
        return slow.alpha_s + local_bytes / slow.bytes_per_s
    if kind == ALL_TO_ALL:
        return sum(_all_to_all_s(local_bytes, a) for a in axes)
    piece, total_s = local_bytes, 0.0
    for axis in sorted(axes, key=lambda a: (-a.bytes_per_s, a.name)):
        total_s += _ring_s(piece, axis)
        piece /= axis.size
    return 2 * total_s if kind == ALL_REDUCE else total_s


def _ring_s(local_bytes: float, axis: Axis) -> float:
    """An all-gather or a reduce-scatter along one axis."""
    steps = axis.size - 1
    if axis.topology == "switch":
        steps = math.ceil(math.log2(axis.size))
    share = (axis.size - 1) / axis.size
    return steps * axis.alpha_s + share * local_bytes / axis.bytes_per_s


def _all_to_all_s(local_bytes: float, axis: Axis) -> float:
    share = (axis.size - 1) / axis.size
    if axis.topology != "switch":
        share = max(share, axis.size / 4)
    steps = 1 if axis.topology == "switch" else max(axis.size // 2, 1)
    return steps * axis.alpha_s + share * local_bytes / axis.bytes_per_s
