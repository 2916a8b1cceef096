"""Parts of mesh axes: the share of an axis, or of joined axes, on each kind of link.

Joined axes have the parts of the devices that they join, however the axes are named:
axes adjacent in the mesh count as one axis of their product, lines of a torus dim that
lie end to end are one line, and lines that make up a dim are the whole dim.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from rhino_jax.hardware.target import Target, Tier
from rhino_jax.hardware.topology import capacities, torus_dims


@dataclass(frozen=True, slots=True)
class AxisShare:
    """The share of a mesh axis, or of several, that lies on one kind of link.

    Attributes:
      size: number of groups of devices it joins; fractional where groups are uneven.
      bytes_per_s: bytes per second that each device of the axis sends over it.
      hops: steps between neighbours from one end to the other.
      alpha_s: seconds of latency of one step.
      topology: "ring", "line", "switch" or "barrier".
      tier: name of the link.
      is_split: whether it uses only part of a torus dim.
      dims: the shares by torus dim, if there are several; all are used at once.
    """

    size: float
    bytes_per_s: float
    hops: float
    alpha_s: float
    topology: str
    tier: str
    is_split: bool = False
    dims: tuple[AxisShare, ...] = ()


def ring_over(parts: Sequence[AxisShare]) -> AxisShare:
    """Return one ring over all devices that these parts, innermost first, join.

    Its `hops` are the steps of the ring, and `alpha_s` the mean latency of a step.
    """
    size = math.prod(part.size for part in parts)
    joined, bytes_per_s, latency_s = 1.0, math.inf, 0.0
    for part in parts:
        bytes_per_s = min(bytes_per_s, joined * part.bytes_per_s)
        joined *= part.size
        # The ring runs through each of its groups at this level.
        latency_s += part.alpha_s * part.hops * size / joined
    topologies = {part.topology for part in parts}
    return AxisShare(
        size=size,
        bytes_per_s=bytes_per_s,
        hops=size - 1,
        alpha_s=latency_s / (size - 1),
        topology=topologies.pop() if len(topologies) == 1 else "line",
        tier=parts[-1].tier,
    )


NO_DIM = -1
"""The dim of a piece that fits none."""


@dataclass(frozen=True, slots=True)
class TorusPiece:
    """A line of `size` devices of a torus dim, `stride` apart.

    Attributes:
      dim: position of the torus dim; `NO_DIM`: devices that fit no dim, linked through
        whatever lies between them.
    """

    dim: int
    stride: int
    size: int


@dataclass(frozen=True, slots=True)
class MeshParts:
    """A mesh of given sizes on the tiers of a target.

    Attributes:
      target: hardware with tiers.
      sizes: sizes of the mesh axes, major first.
      domains: number of devices in one domain of each tier.
      torus: by tier, the dims of its torus, and the pieces of these that each axis
        uses; both empty for switches.
    """

    target: Target
    sizes: tuple[int, ...]
    domains: tuple[int, ...]
    torus: tuple[tuple[tuple[int, ...], Mapping[int, Sequence[TorusPiece]]], ...]

    @classmethod
    def of(cls, target: Target, sizes: Sequence[int]) -> MeshParts:
        """Return the parts of a mesh on a target.

        Args:
          target: hardware with tiers.
          sizes: sizes of the mesh axes, major first.
        """
        domains = capacities(target, math.prod(sizes))
        torus: list[tuple[tuple[int, ...], Mapping[int, Sequence[TorusPiece]]]] = []
        within = 1
        for tier, domain, shares in zip(
            target.tiers, domains, _shares(sizes, domains), strict=True
        ):
            if tier.topology == "torus":
                dims = torus_dims(tier, max(1, round(domain / within)))
                torus.append((dims, on_torus(dims, shares)))
            else:
                torus.append(((), {}))
            within = domain
        return cls(target, tuple(sizes), domains, tuple(torus))

    @property
    def is_even(self) -> bool:
        """Whether every domain of a tier holds as many devices of each mesh axis."""
        within = 1
        for domain, shares in zip(
            self.domains, _shares(self.sizes, self.domains), strict=True
        ):
            whole = [round(share) for share in shares]
            if whole != shares or math.prod(whole) * within != domain:
                return False
            within = domain
        return True

    def together(self, axes: Iterable[int]) -> tuple[AxisShare, ...]:
        """Return the parts of the devices that some axes join, innermost first.

        Args:
          axes: positions of the axes, at least one.
        """
        chosen = frozenset(axes)
        sizes, places = _neighbours_as_one(self.sizes, chosen)
        parts: list[AxisShare] = []
        for tier, shares, (dims, pieces) in zip(
            self.target.tiers, _shares(sizes, self.domains), self.torus, strict=True
        ):
            if tier.topology == "torus":
                mine = [p for a in sorted(chosen) for p in pieces.get(a, ())]
                found = _on_dims(tier, dims, mine)
                parts += sorted(found, key=lambda part: -part.bytes_per_s)
            elif (size := math.prod(shares[k] for k in places)) > 1:
                parts.append(
                    AxisShare(
                        size,
                        tier.bytes_per_s,
                        size - 1,
                        tier.alpha_s,
                        tier.topology,
                        tier.name,
                    )
                )
        return tuple(parts)


def _neighbours_as_one(
    sizes: Sequence[int], chosen: frozenset[int]
) -> tuple[list[int], list[int]]:
    """Merge chosen axes that are adjacent in the mesh.

    Axes of one device do not separate others.

    Returns:
      The sizes of the merged mesh, and the positions of the chosen axes in it.
    """
    found: list[int] = []
    places: list[int] = []
    for axis, size in enumerate(sizes):
        if size == 1:
            continue
        if axis in chosen and places and places[-1] == len(found) - 1:
            found[-1] *= size
            continue
        if axis in chosen:
            places.append(len(found))
        found.append(size)
    return found, places


def _shares(sizes: Sequence[int], domains: Sequence[int]) -> list[list[float]]:
    """Return by tier and axis how many groups of the next inner tier the axis joins."""
    num_devices = math.prod(sizes)
    joined = [1.0] * len(sizes)
    shares = []
    for domain in domains:
        now, stride = list(joined), 1
        for axis in reversed(range(len(sizes))):
            inside = _inside(sizes[axis], stride, domain, num_devices)
            now[axis] = max(joined[axis], inside)
            stride *= sizes[axis]
        shares.append([new / old for new, old in zip(now, joined, strict=True)])
        joined = now
    return shares


def _inside(size: int, stride: int, domain: int, num_devices: int) -> float:
    """Return how many devices of an axis share a domain of this size, on average."""
    if domain >= num_devices or domain % (size * stride) == 0:
        return size
    most = min(size, max(1, domain // stride))
    if most == 1:
        return 1
    # A group that does not fit evenly lies over at least two domains somewhere.
    return size / max(2, math.ceil(size / most))


def on_torus(
    dims: tuple[int, ...], shares: Sequence[float]
) -> dict[int, list[TorusPiece]]:
    """Return the pieces of a torus that every axis uses, by axis of several devices.

    Minor axes choose first, as in JAX's `mesh_utils.create_device_mesh` with
    `allow_split_physical_axes`.

    Args:
      dims: sizes of the torus dims.
      shares: devices of the torus along every mesh axis, major first.
    """
    # The stride of a dim's next piece: the product of its pieces so far.
    strides = [1] * len(dims)
    return {
        axis: _pieces(dims, strides, round(n))
        for axis, n in reversed(list(enumerate(shares)))
        if n > 1
    }


def _pieces(dims: tuple[int, ...], strides: list[int], size: int) -> list[TorusPiece]:
    """Return dims, and lines along dims, that make up `size`; updates `strides`."""
    sizes = _preferred(dims, tuple(strides), size)
    rest = 1
    if sizes is None:
        # No such part of the torus: as much of it as fits the dims.
        counts = _divisors(size)
        found = (_preferred(dims, tuple(strides), size // n) for n in counts)
        rest, sizes = next((n, f) for n, f in zip(counts, found, strict=True) if f)
    pieces = [TorusPiece(d, strides[d], n) for d, n in enumerate(sizes) if n > 1]
    for piece in pieces:
        strides[piece.dim] *= piece.size
    return pieces if rest == 1 else [*pieces, TorusPiece(NO_DIM, 1, rest)]


@functools.cache
def _preferred(
    dims: tuple[int, ...], taken: tuple[int, ...], size: int
) -> tuple[int, ...] | None:
    """Return how many devices of every torus dim make up `size`, as JAX prefers: whole
    dims, several rather than one, dims that minor axes began; None if none do.

    Args:
      dims: sizes of the torus dims.
      taken: the product of the pieces of every dim that minor axes use.
      size: number of devices.
    """

    def preference(sizes: tuple[int, ...]) -> tuple[object, ...]:
        whole = [n for n, dim in zip(sizes, dims, strict=True) if n == dim > 1]
        begun = [n for n, used in zip(sizes, taken, strict=True) if used > 1]
        return math.prod(whole), len(whole), math.prod(begun), sizes

    free = [_divisors(dim // used) for dim, used in zip(dims, taken, strict=True)]
    fitting = (sizes for sizes in product(*free) if math.prod(sizes) == size)
    return max(fitting, key=preference, default=None)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _on_dims(
    tier: Tier, dims: tuple[int, ...], pieces: Sequence[TorusPiece]
) -> Iterable[AxisShare]:
    """Return the parts that pieces of a torus make up.

    All dims together are one part, whose links are used at once; pieces that fit no dim
    follow.
    """
    wraps = tier.wraps(dims)
    links: list[AxisShare] = []
    for dim in range(len(dims)):
        mine = _end_to_end(p for p in pieces if p.dim == dim)
        if [p.size for p in mine] == [dims[dim]]:
            links.append(_whole(tier, dims[dim], wraps[dim]))
        elif mine:
            # Lines in one dim, nearest devices first, are merged into one share.
            lines = [_line(tier, p) for p in mine]
            ring = ring_over(lines)
            links.append(
                replace(
                    lines[-1],
                    size=ring.size,
                    bytes_per_s=ring.bytes_per_s,
                    hops=sum(line.hops for line in lines),
                )
            )
    rest = [_line(tier, p) for p in pieces if p.dim == NO_DIM]
    return [*_at_once(links), *rest]


def _end_to_end(pieces: Iterable[TorusPiece]) -> list[TorusPiece]:
    """Merge pieces of one dim where one begins at the end of another."""
    joined: list[TorusPiece] = []
    for piece in sorted(pieces, key=lambda p: p.stride):
        last = joined[-1] if joined else None
        if last and last.stride * last.size == piece.stride:
            joined[-1] = replace(last, size=last.size * piece.size)
        else:
            joined.append(piece)
    return joined


def _at_once(links: Sequence[AxisShare]) -> Iterable[AxisShare]:
    """Merge independent torus dims into one part: the links of all are used at once."""
    if len(links) <= 1:
        return links
    return [
        AxisShare(
            size=math.prod(x.size for x in links),
            bytes_per_s=sum(x.bytes_per_s for x in links),
            hops=sum(x.hops for x in links),
            alpha_s=links[0].alpha_s,
            topology="ring" if all(x.topology == "ring" for x in links) else "line",
            tier=links[0].tier,
            is_split=any(x.is_split for x in links),
            dims=tuple(links),
        )
    ]


def _whole(tier: Tier, size: int, wraps: bool) -> AxisShare:
    """Return the share that is a whole torus dim."""
    return AxisShare(
        size=size,
        bytes_per_s=(2 if wraps else 1) * tier.bytes_per_s,
        hops=size - 1,
        alpha_s=tier.alpha_s,
        topology="ring" if wraps else "line",
        tier=tier.name,
    )


def _line(tier: Tier, piece: TorusPiece) -> AxisShare:
    """Return the share that is a line over every `stride`-th device of a torus dim."""
    return AxisShare(
        size=piece.size,
        bytes_per_s=tier.bytes_per_s / piece.stride,
        hops=(piece.size - 1) * piece.stride,
        alpha_s=tier.alpha_s,
        topology="line",
        tier=tier.name,
        is_split=True,
    )
