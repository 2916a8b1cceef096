"""Mesh axes as the cost model sees them: a size and the links it lies on."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Axis:
    """One mesh axis laid over hardware.

    Attributes:
      name: as in `jax.sharding.Mesh.axis_names`.
      size: number of devices along it.
      alpha_s: seconds of latency of one step between neighbours (ring hop, or
        one message through a switch).
      bytes_per_s: bytes per second that one device sends along this axis while
        all devices take part (both directions of a ring with wrap-around).
      topology: "ring" (wraps around), "line" (does not), "switch" (any to any), or
        "barrier" (threads of one process, which meet once for any collective).
      tier: name of the link, as "ici", "nvlink", "network".
    """

    name: str
    size: int
    alpha_s: float
    bytes_per_s: float
    topology: str = "switch"
    tier: str = ""


@dataclass(frozen=True)
class LaidMesh:
    """A mesh laid over hardware.

    Attributes:
      axes: major first.
      gathers_by_axis, scatters_by_axis: as of `Device`.
      says_stops: whether programs that run on it say every stop on the way from one
        spec to another; as of `Decisions`.
    """

    axes: tuple[Axis, ...]
    gathers_by_axis: bool = False
    scatters_by_axis: bool = False
    says_stops: bool = True

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        return tuple(a.size for a in self.axes)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(a.name for a in self.axes)

    @property
    def num_devices(self) -> int:
        return math.prod(self.sizes)


def size_of(mesh: LaidMesh, axes: Sequence[int]) -> int:
    """Number of devices over which the given axes (by position) cut."""
    return math.prod(mesh.axes[a].size for a in axes)
