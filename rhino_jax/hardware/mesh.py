"""Mesh axes as the cost model sees them: a size and the links it lies on."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from rhino_jax.hardware.lowering import AS_WRITTEN, LoweringPolicy
from rhino_jax.hardware.parts import AxisShare


@dataclass(frozen=True, slots=True)
class MeshAxis:
    """One mesh axis laid over hardware, or several taken together.

    Attributes:
      name: as in `jax.sharding.Mesh.axis_names`.
      size: number of devices along it.
      alpha_s: seconds of latency of one step between neighbours (ring hop, or
        one message through a switch).
      bytes_per_s: bytes per second that one device sends along this axis while
        all devices take part (both directions of a ring with wrap-around).
      topology: "ring" (wraps around), "line" (does not), "switch" (any to any), or
        "barrier" (threads of one process, which meet once for any collective).
      tier: name of the link, as "ici", "nvlink", "network"; of joined axes the
        outermost one.
      parts: shares of the axis on each kind of link, innermost first; empty if unknown.
      members: the single axes of a joined axis; empty for a single one.
    """

    name: str
    size: int
    alpha_s: float
    bytes_per_s: float
    topology: str = "switch"
    tier: str = ""
    parts: tuple[AxisShare, ...] = ()
    members: tuple[MeshAxis, ...] = ()

    @property
    def links(self) -> tuple[object, ...]:
        """All attributes that the cost of collectives over this axis depends on."""
        return self.size, self.alpha_s, self.bytes_per_s, self.topology, self.parts


@dataclass(frozen=True)
class LaidMesh:
    """A mesh laid over hardware.

    Attributes:
      axes: mesh axes, major first.
      lowering: how the compiler lowers a change of sharding into collectives.
      joins: positions of several axes of more than one device each, ascending → the
        joined axis. Empty where links are stated by axis.
    """

    axes: tuple[MeshAxis, ...]
    lowering: LoweringPolicy = AS_WRITTEN
    joins: Mapping[tuple[int, ...], MeshAxis] = field(default_factory=dict, hash=False)

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        return tuple(a.size for a in self.axes)

    @property
    def long(self) -> tuple[int, ...]:
        """Positions of the axes with more than one device."""
        return long_axes(self.sizes)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(a.name for a in self.axes)

    def over(self, axes: Iterable[int]) -> tuple[MeshAxis, ...]:
        """Return the axes that a collective over some mesh axes runs over.

        Args:
          axes: positions of the mesh axes.
        Returns:
          One axis that joins the same devices, or the axes one after another where
          links are stated by axis.
        """
        long = tuple(sorted(a for a in axes if self.sizes[a] > 1))
        joined = self.joins.get(long)
        return tuple(self.axes[a] for a in long) if joined is None else (joined,)

    @functools.cached_property
    def kinds(self) -> tuple[int, ...]:
        """The first interchangeable axis of every axis, by position.

        Two axes are interchangeable if they are equivalent alone and in every
        combination with the others.
        """
        count = len(self.axes)
        found = list(range(count))
        for b in range(count):
            for a in range(b):
                if found[a] == a and self._alike(a, b):
                    found[b] = a
                    break
        return tuple(found)

    def _alike(self, a: int, b: int) -> bool:
        others = [k for k in range(len(self.axes)) if k not in (a, b)]
        return all(
            self._links((a, *chosen)) == self._links((b, *chosen))
            for count in range(len(others) + 1)
            for chosen in combinations(others, count)
        )

    def _links(self, axes: Iterable[int]) -> tuple[object, ...]:
        return tuple(axis.links for axis in self.over(axes))

    @property
    def signature(self) -> frozenset[object]:
        """A key that is equal for meshes that differ in axis names and order alone."""
        counts = range(1, len(self.long) + 1)
        every = (c for n in counts for c in combinations(self.long, n))
        joins = Counter(
            (frozenset(Counter(self.axes[k].links for k in c).items()), self._links(c))
            for c in every
        )
        return frozenset(joins.items())

    @property
    def num_devices(self) -> int:
        return math.prod(self.sizes)


def long_axes(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the positions of axes with several devices: others shard nothing."""
    return tuple(k for k, size in enumerate(sizes) if size > 1)


def size_of(mesh: LaidMesh, axes: Sequence[int]) -> int:
    """Return the number of shards over the given axes (by position)."""
    return math.prod(mesh.axes[a].size for a in axes)
