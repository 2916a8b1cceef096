"""Time and wire bytes of collectives.

The cost of every kind is latency plus bytes over bandwidth. `local_bytes` is always
the larger of one device's operand and result: the result of an all-gather, the operand
of a reduce-scatter, the buffer of the others.

Source: ring algorithms as in Thakur, Rabenseifner, Gropp, "Optimization of
Collective Communication Operations in MPICH" (IJHPCA 2005), section 4; all-to-all
on a ring by its bisection (JAX scaling book, "Sharded matrices", all-to-all).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from rhino_jax.hardware.mesh import MeshAxis
from rhino_jax.hardware.parts import AxisShare, ring_over
from rhino_jax.ir.collectives import KINDS, CollectiveKind, Pattern


def wire_bytes(kind: str, local_bytes: float, size: int) -> float:
    """Return the bytes that each of `size` devices sends for one collective."""
    if size <= 1:
        return 0.0
    if KINDS[kind].pattern is Pattern.HOP:
        return local_bytes
    return KINDS[kind].rounds * (size - 1) * local_bytes / size


def collective_s(kind: str, local_bytes: float, axes: Sequence[MeshAxis]) -> float:
    """Return the seconds of one collective over the product of `axes`.

    Several axes are used one after the other, the slowest links with the smallest
    shards: `LaidMesh.over` returns the axes that a collective really runs over. Linear
    in `local_bytes`; monotone in them and in every axis size.

    Args:
      kind: name of one of `rhino_jax.ir.collectives.KINDS`.
      local_bytes: bytes on one device, as the module's docstring defines them.
      axes: the axes that the collective runs over.
    Returns:
      Seconds; 0 if no axis has more than one device.
    """
    axes = [a for a in axes if a.size > 1]
    if not axes:
        return 0.0
    taken = _taken(KINDS[kind], local_bytes, axes)
    if len(axes) == 1 and axes[0].members:
        # For strided parts of one torus dim, one axis after the other is faster.
        taken = taken.or_less(_taken(KINDS[kind], local_bytes, axes[0].members))
    return taken.latency_s + taken.sending_s


class _CollectiveSeconds(NamedTuple):
    """Seconds of a collective.

    Attributes:
      latency_s: latency of its steps.
      sending_s: time in which its bytes are sent.
    """

    latency_s: float
    sending_s: float

    def then(self, other: _CollectiveSeconds) -> _CollectiveSeconds:
        """Return the seconds of both, one after the other."""
        return _CollectiveSeconds(
            self.latency_s + other.latency_s, self.sending_s + other.sending_s
        )

    def or_less(self, other: _CollectiveSeconds) -> _CollectiveSeconds:
        """Return the smaller latency and the smaller sending time of two algorithms.

        Compilers choose few steps for small messages, and keep the links busy for large
        ones, which they divide into chunks.
        """
        return _CollectiveSeconds(
            min(self.latency_s, other.latency_s), min(self.sending_s, other.sending_s)
        )


_NOTHING = _CollectiveSeconds(0.0, 0.0)


def _taken(
    kind: CollectiveKind, local_bytes: float, axes: Sequence[MeshAxis]
) -> _CollectiveSeconds:
    if all(a.topology == "barrier" for a in axes):
        # All threads meet at one barrier, however much they then copy.
        meeting_s = max(a.alpha_s for a in axes) * math.prod(a.size for a in axes)
        copying = [replace(a, alpha_s=0.0, topology="switch", parts=()) for a in axes]
        return _CollectiveSeconds(meeting_s, 0.0).then(
            _taken(kind, local_bytes, copying)
        )
    if kind.pattern is Pattern.HOP:
        # The slowest link need not be the one with the longest latency.
        links = [link for a in axes for link in _links(a)]
        slowest = min(link.bytes_per_s for link in links)
        return _CollectiveSeconds(
            max(link.alpha_s for link in links), local_bytes / slowest
        )
    if kind.pattern is Pattern.EXCHANGE:
        each = [_all_to_all(local_bytes, a) for a in axes]
        return functools.reduce(_CollectiveSeconds.then, each)
    piece, total = local_bytes, _NOTHING
    for axis in sorted(axes, key=lambda a: (-a.bytes_per_s, a.name)):
        total = total.then(_gather(piece, axis))
        piece /= axis.size
    return functools.reduce(_CollectiveSeconds.then, [total] * kind.rounds)


def _links(axis: MeshAxis) -> tuple[AxisShare, ...]:
    """Return the links of an axis one by one, every dim of a torus separately."""
    if not axis.parts:
        return (_as_link(axis),)
    return tuple(
        ring_over([link]) for part in axis.parts for link in part.dims or (part,)
    )


def _as_link(axis: MeshAxis) -> AxisShare:
    return AxisShare(
        size=axis.size,
        bytes_per_s=axis.bytes_per_s,
        hops=axis.size - 1,
        alpha_s=axis.alpha_s,
        topology=axis.topology,
        tier=axis.tier,
    )


def _gather(local_bytes: float, axis: MeshAxis) -> _CollectiveSeconds:
    """Return the seconds of an all-gather or a reduce-scatter along one axis."""
    if len(axis.parts) <= 1:
        return _ring(local_bytes, _as_link(axis))
    return _rings(local_bytes, axis.parts)


def _rings(local_bytes: float, parts: Sequence[AxisShare]) -> _CollectiveSeconds:
    """Return the seconds in one ring over all links, or in several, inner first."""
    found = _ring(local_bytes, ring_over(parts))
    for count in range(1, len(parts)):
        ring = ring_over(parts[:count])
        rest = _rings(local_bytes / ring.size, parts[count:])
        found = found.or_less(_ring(local_bytes, ring).then(rest))
    return found


def _ring(local_bytes: float, link: AxisShare) -> _CollectiveSeconds:
    steps = link.size - 1
    if link.topology == "switch":
        steps = math.ceil(math.log2(link.size))
    share = (link.size - 1) / link.size
    return _CollectiveSeconds(
        steps * link.alpha_s, share * local_bytes / link.bytes_per_s
    )


def _all_to_all(local_bytes: float, axis: MeshAxis) -> _CollectiveSeconds:
    """Return the seconds of an all-to-all: the busiest link is the bottleneck."""
    latency_s = sending_s = 0.0
    for link in _links(axis):
        share = (link.size - 1) / link.size
        if link.topology != "switch":
            share = max(share, link.size / 4)
        steps = 1 if link.topology == "switch" else max(link.size // 2, 1)
        latency_s += steps * link.alpha_s
        sending_s = max(sending_s, share * local_bytes / link.bytes_per_s)
    return _CollectiveSeconds(latency_s, sending_s)
