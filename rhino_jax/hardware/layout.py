"""Laying a mesh over hardware: which link each mesh axis lies on, and which meshes.

Devices are in the order of `hardware.ordering`: the minor mesh axis runs over
neighbours. From the minor axis outwards, axes fill the innermost tier, then the next.
An axis may lie on several tiers (16 GPUs over two hosts) or several torus dims. Its
parts then work as a pipeline, as the rings of NCCL and the multi-dim rings of TPUs
do, and the slowest part is the bottleneck:

    bytes_per_s = min over parts of (devices of the axis joined further in) x link

since all those devices send through their own link of the outer part at once: eight
H100s of a host reach another host with 8 x 50 GB/s, so 16 of them in a ring get
min(450, 8 x 50) = 400 GB/s. Where hosts hold uneven shares of an axis, the average
share counts. Latency is that of all steps of such a ring, each on its own link,
averaged over the n - 1 of them.

A collective over several axes runs once over the devices that they join: its cost is
that of one axis that joins them (`LaidMesh.over`). Axes adjacent in the mesh, or end to
end on a torus, fill a switch or a ring together; an axis between them that is not part
of the collective keeps its distance between their devices.

On a torus, with L = bytes per second of one link in one direction:

    a whole dim that wraps around        ring    2 L
    a whole dim that does not            line    L
    part of a dim, neighbours            line    L
    part of a dim, every s-th device     line    L / s     (s such lines share links)
    several dims, whole or not           the sum of theirs, all used at once

On several dims the data is divided, each part takes another dim first, and the parts
are sized so that all links are equally busy: for a ring of 4 and a pair along another
dim the resulting time is within 1 % of that of the summed bandwidth, likewise for a
ring of 16 and every eighth device.

The time to move a given number of bytes *per device*, α (n - 1) + (n - 1) bytes /
bytes_per_s, never falls as an axis grows. The time for a given *total* does not fall on
one kind of link either, but does where the larger axis has more links of its own, as on
real hardware: a whole ring of 16 against a line of 8, eight network adapters against
four.

Source: "How to Scale Your Model" (jax-ml.github.io/scaling-book), chapters 2, 3, 12.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

from rhino_jax.errors import HardwareError, MeshError, nearest
from rhino_jax.hardware.mesh import LaidMesh, MeshAxis
from rhino_jax.hardware.parts import AxisShare, MeshParts, ring_over
from rhino_jax.hardware.target import Target
from rhino_jax.hardware.topology import factorisations


MESH_AXIS_NAMES = ("x", "y", "z", "w")
"""Default names of the axes of meshes that rhino chooses, major first."""

_MAX_SHAPES = 12


def lay_out(target: Target, mesh_axes: Sequence[tuple[str, int]]) -> LaidMesh:
    """Return the mesh laid over hardware: the links of each axis and of joined axes.

    Args:
      target: the hardware.
      mesh_axes: (name, size) of the mesh axes, major first.
    Raises:
      MeshError: an axis has no devices, two have the same name, or the mesh is
        larger than the target.
      HardwareError: the target states its links by axis, and has none for one of these.
    """
    _check(target, mesh_axes)
    joins: dict[tuple[int, ...], MeshAxis] = {}
    if target.links:
        axes = tuple(_stated(target, name, n) for name, n in mesh_axes)
    else:
        parts = MeshParts.of(target, [n for _, n in mesh_axes])
        axes = tuple(
            _join(target, name, n, parts.together([k]))
            for k, (name, n) in enumerate(mesh_axes)
        )
        joins = _joins(target, axes, parts)
    return LaidMesh(axes, target.device.lowering, joins)


def _joins(
    target: Target, axes: Sequence[MeshAxis], mesh: MeshParts
) -> dict[tuple[int, ...], MeshAxis]:
    """Return the joined axis of every combination of axes.

    Empty where the mesh divides a torus unevenly, as axes of 3 do slices of 144 chips.
    """
    found = {}
    long = [k for k, axis in enumerate(axes) if axis.size > 1]
    # The combination of all axes comes first.
    for count in range(len(long), 1, -1):
        for chosen in combinations(long, count):
            members = tuple(axes[k] for k in chosen)
            size = math.prod(axis.size for axis in members)
            parts = mesh.together(chosen)
            if not math.isclose(math.prod(part.size for part in parts), size):
                return {}
            name = "+".join(axis.name for axis in members)
            joined = _join(target, name, size, parts)
            found[chosen] = replace(joined, members=members)
    return found


def _check(target: Target, mesh_axes: Sequence[tuple[str, int]]) -> None:
    names = ", ".join(name for name, _ in mesh_axes)
    shape = "x".join(str(n) for _, n in mesh_axes)
    if len({name for name, _ in mesh_axes}) != len(mesh_axes):
        raise MeshError(
            "two mesh axes have the same name.",
            numbers=f"axes {names}",
            fix="give every axis its own name.",
        )
    if any(n < 1 for _, n in mesh_axes):
        raise MeshError(
            "a mesh axis has no devices.",
            numbers=f"mesh {shape} with axes {names}",
            fix="give every axis a size of at least 1.",
        )
    num_devices = math.prod(n for _, n in mesh_axes)
    reach = target.num_devices
    if reach is None and target.tiers and not target.links:
        reach = target.tiers[-1].size
    if reach is not None and num_devices > reach:
        raise MeshError(
            f"the mesh is larger than the hardware {target.name!r}.",
            numbers=f"mesh {shape} has {num_devices} devices, the hardware {reach}",
            fix="use a smaller mesh, or name larger hardware.",
        )


def _stated(target: Target, name: str, size: int) -> MeshAxis:
    links = dict(target.links)
    if name not in links:
        raise HardwareError(
            f"target {target.name!r} states its links by mesh axis, and has none for"
            f" axis {name!r}.{nearest(name, links)}",
            numbers=f"links: {', '.join(links)}",
            fix=f"add a link for {name!r}, or name the mesh axes as the target does.",
        )
    link = links[name]
    return MeshAxis(name, size, link.alpha_s, link.bytes_per_s, link.topology, "stated")


def _join(target: Target, name: str, size: int, parts: Sequence[AxisShare]) -> MeshAxis:
    """Return the axis that these parts, innermost first, make up."""
    if not parts:
        tier = target.tiers[0]
        topology = "switch" if tier.topology == "torus" else tier.topology
        return MeshAxis(name, size, tier.alpha_s, tier.bytes_per_s, topology, tier.name)
    ring = ring_over(parts)
    return MeshAxis(
        name=name,
        size=size,
        alpha_s=ring.alpha_s,
        bytes_per_s=ring.bytes_per_s,
        topology=ring.topology,
        tier=ring.tier,
        parts=tuple(parts),
    )


def mesh_axis_names(target: Target, rank: int) -> tuple[str, ...]:
    """Return names for `rank` mesh axes: those of the target's links, or x, y, z, w."""
    return tuple(name for name, _ in target.links)[:rank] or MESH_AXIS_NAMES[:rank]


def mesh_shapes(
    target: Target, num_devices: int, max_axes: int = 3
) -> tuple[tuple[int, ...], ...]:
    """Return mesh shapes worth trying, fewest axes first.

    Every axis has at least two devices. Among shapes with equally many axes, those
    whose axes lie on whole links (one tier, whole torus dims) come first, then those
    with the most equal sizes. At most 12 shapes, in a deterministic order. TPUs make
    a mesh of each of them (`hardware.ordering`).

    Args:
      target: the hardware.
      num_devices: number of devices of the mesh.
      max_axes: largest number of axes of a mesh; at most 4.
    Raises:
      MeshError: there are no devices, or more than the target has.
    """
    _check(target, [("x", num_devices)])
    if num_devices == 1:
        return ((1,),)
    is_torus = target.torus is not None and not target.links
    most_axes = min(max_axes, len(target.links) or len(MESH_AXIS_NAMES))
    shapes: list[tuple[int, ...]] = []
    for rank in range(1, most_axes + 1):
        room = math.ceil((_MAX_SHAPES - len(shapes)) / (most_axes - rank + 1))
        found = factorisations(num_devices, rank, 2)
        if is_torus and rank > 1:
            # Devices are in no order by which slices share an axis unevenly.
            found = tuple(s for s in found if MeshParts.of(target, s).is_even)
        shapes += sorted(found, key=lambda s: _rank(target, s))[:room]
    return tuple(shapes)


def _rank(target: Target, shape: tuple[int, ...]) -> tuple[int, int, tuple[int, ...]]:
    """Return a sort key: how often axes share links, then how unequal sizes are."""
    misfit = 0
    if not target.links:
        mesh = MeshParts.of(target, shape)
        misfit = sum(_misfit(mesh.together([axis])) for axis in range(len(shape)))
    return misfit, sum(shape), shape


def _misfit(parts: Sequence[AxisShare]) -> int:
    """Return a penalty of an axis: its split links, plus all its kinds of link but one.

    Every split torus dim is a kind of link of its own; whole dims of one part are one.
    """
    links = [part.dims or (part,) for part in parts]
    split = [sum(x.is_split for x in dims) for dims in links]
    whole = sum(any(not x.is_split for x in dims) for dims in links)
    return max(0, whole + sum(split) - 1) + sum(split)
