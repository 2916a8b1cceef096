"""The parts of each mesh axis: how much of it lies on which link."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from rhino_jax.hardware.target import Target, Tier
from rhino_jax.hardware.topology import capacities, torus_dims


@dataclass(frozen=True, slots=True)
class Part:
    """The share of a mesh axis that lies on one kind of link.

    Attributes:
      size: how many groups of devices it joins; a fraction where groups are uneven.
      bytes_per_s: bytes per second that each device of the axis sends over it.
      hops: steps between neighbours from one end to the other.
      alpha_s: seconds of latency of one step.
      topology: "ring", "line", "switch" or "barrier".
      tier: name of the link.
      is_split: it takes only part of a torus dim.
    """

    size: float
    bytes_per_s: float
    hops: float
    alpha_s: float
    topology: str
    tier: str
    is_split: bool = False


def parts_of_mesh(target: Target, sizes: Sequence[int]) -> list[list[Part]]:
    """For every mesh axis, its parts, innermost first.

    Args:
      target: hardware with tiers.
      sizes: sizes of the mesh axes, major first.
    """
    num_devices = math.prod(sizes)
    parts: list[list[Part]] = [[] for _ in sizes]
    domains = capacities(target, num_devices)
    within = 1
    for tier, domain, shares in zip(
        target.tiers, domains, _shares(sizes, domains), strict=True
    ):
        if tier.topology == "torus":
            found = _on_torus(tier, max(1, round(domain / within)), shares)
        else:
            found = _on_switch(tier, shares)
        for axis, part in sorted(found, key=lambda x: -x[1].bytes_per_s):
            parts[axis].append(part)
        within = domain
    return parts


def _shares(sizes: Sequence[int], domains: Sequence[int]) -> list[list[float]]:
    """For every tier and axis, how many groups of the tier within the axis joins."""
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
    """Devices of an axis that share a domain of that many, on average."""
    if domain >= num_devices or domain % (size * stride) == 0:
        return size
    most = min(size, max(1, domain // stride))
    if most == 1:
        return 1
    # A group that does not fit evenly lies over at least two domains somewhere.
    return size / max(2, math.ceil(size / most))


def _on_switch(tier: Tier, shares: Sequence[float]) -> list[tuple[int, Part]]:
    return [
        (axis, Part(n, tier.bytes_per_s, n - 1, tier.alpha_s, tier.topology, tier.name))
        for axis, n in enumerate(shares)
        if n > 1
    ]


def _on_torus(
    tier: Tier, num_groups: int, shares: Sequence[float]
) -> list[tuple[int, Part]]:
    """The parts of every axis on the dims of a torus: whole dims where they fit."""
    dims = torus_dims(tier, num_groups)
    minor_first = [
        (axis, round(n)) for axis, n in reversed(list(enumerate(shares))) if n > 1
    ]
    whole = _assign(minor_first, dims, tuple(range(len(dims))))
    taken = {d for chosen in whole.values() for d in chosen}
    # Of every dim that is to be split: how much lies within the next piece of it.
    strides = {d: 1 for d in range(len(dims)) if d not in taken}
    parts = []
    for axis, size in minor_first:
        if axis in whole:
            parts.append((axis, _whole_dims(tier, dims, whole[axis])))
        else:
            parts += [(axis, part) for part in _pieces(tier, dims, strides, size)]
    return parts


def _assign(
    wanted: Sequence[tuple[int, int]], dims: Sequence[int], free: tuple[int, ...]
) -> dict[int, tuple[int, ...]]:
    """Whole torus dims for as many axes as possible.

    Minor axes choose first, and prefer several dims to one, as in JAX's
    `mesh_utils.create_device_mesh`.
    """
    if not wanted:
        return {}
    (axis, size), rest = wanted[0], wanted[1:]
    choices: list[tuple[int, ...]] = [
        chosen
        for count in range(len(free), 0, -1)
        for chosen in combinations(free, count)
        if math.prod(dims[d] for d in chosen) == size
        and all(dims[d] > 1 for d in chosen)
    ]
    results = [
        {axis: c, **_assign(rest, dims, tuple(d for d in free if d not in c))}
        for c in choices
    ]
    # `max` takes the first of the best.
    return max([*results, _assign(rest, dims, free)], key=len)


def _whole_dims(tier: Tier, dims: tuple[int, ...], chosen: tuple[int, ...]) -> Part:
    wraps = tier.wraps(dims)
    return Part(
        size=math.prod(dims[d] for d in chosen),
        bytes_per_s=sum(2 if wraps[d] else 1 for d in chosen) * tier.bytes_per_s,
        hops=sum(dims[d] - 1 for d in chosen),
        alpha_s=tier.alpha_s,
        topology="ring" if all(wraps[d] for d in chosen) else "line",
        tier=tier.name,
    )


def _pieces(
    tier: Tier, dims: tuple[int, ...], strides: dict[int, int], size: int
) -> list[Part]:
    """Dims and lines along parts of dims, cut off `strides`, that make up `size`."""
    pieces = []
    while size > 1:
        # The dim that gives most, and of those the one with the nearest devices.
        cut, _, dim = max(
            ((math.gcd(size, dims[d] // s), -s, d) for d, s in strides.items()),
            default=(1, 0, 0),
        )
        if cut == 1:
            # What fits no dim is a line through whatever lies between.
            pieces.append(_line(tier, size, 1))
            break
        if cut == dims[dim]:
            pieces.append(_whole_dims(tier, dims, (dim,)))
        else:
            pieces.append(_line(tier, cut, strides[dim]))
        strides[dim] *= cut
        size //= cut
    return pieces


def _line(tier: Tier, size: int, stride: int) -> Part:
    """A line that joins every `stride`-th device of a torus dim."""
    return Part(
        size=size,
        bytes_per_s=tier.bytes_per_s / stride,
        hops=(size - 1) * stride,
        alpha_s=tier.alpha_s,
        topology="line",
        tier=tier.name,
        is_split=True,
    )
