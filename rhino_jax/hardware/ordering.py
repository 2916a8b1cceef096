"""The order in which devices make a mesh: the one that costs are estimated for.

On a torus every mesh axis takes the dims, and the lines along dims, that
`parts.on_torus` estimates. Slices are divided along the major axes, and the devices of
one chip along the minor ones. This is the order of JAX's `create_device_mesh` with
`allow_split_physical_axes`, but for slices of up to 32 devices, whose rings JAX folds
into axes of which each is a line, and for chips of two devices. A mesh of one axis is
JAX's own. Other devices are in the order of their ids.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rhino_jax.hardware.parts import NO_DIM, TorusPiece, on_torus
from rhino_jax.hardware.target import Target
from rhino_jax.hardware.topology import capacities, factorisations, torus_dims


@dataclass(frozen=True, slots=True)
class DeviceOrder:
    """The box of a torus that a mesh fills, and how its devices become the mesh.

    Attributes:
      box: sides of the box that the devices fill: slices, torus dims, devices of a
        chip.
      split: the box with each of its sides divided among the mesh axes.
      axes: the transposition of `split` that has the parts of each mesh axis together.
      sizes: sizes of the mesh axes, major first.
    """

    box: tuple[int, ...]
    split: tuple[int, ...]
    axes: tuple[int, ...]
    sizes: tuple[int, ...]

    def arranged(self, devices: np.ndarray) -> np.ndarray:
        """Return devices of the shape `box` in the shape of the mesh."""
        return devices.reshape(self.split).transpose(self.axes).reshape(self.sizes)


def order_on(grid: Sequence[int], sizes: Sequence[int]) -> DeviceOrder | None:
    """Return the order of a mesh's devices; None if no box has as many.

    Args:
      grid: number of slices, dims of the torus, devices of a chip.
      sizes: sizes of the mesh axes, major first.
    """
    slices, *dims, cores = grid
    count = math.prod(sizes)
    for used in (n for n in range(1, slices + 1) if count % n == 0):
        outer = _shared(sizes, used)
        rest = [n // k for n, k in zip(sizes, outer, strict=True)]
        chip = _shared(rest[::-1], cores)[::-1]
        chips = [n // k for n, k in zip(rest, chip, strict=True)]
        found = _box(tuple(dims), chips)
        if found is not None:
            box, pieces = found
            return _order(sizes, outer, pieces, chip, (used, *box, math.prod(chip)))
    return None


def _shared(sizes: Sequence[int], count: int) -> list[int]:
    """Return the share of every axis in `count` groups, which the first axes take."""
    shares = []
    for size in sizes:
        shares.append(math.gcd(size, count))
        count //= shares[-1]
    return shares


def _box(
    dims: tuple[int, ...], sizes: Sequence[int]
) -> tuple[tuple[int, ...], dict[int, list[TorusPiece]]] | None:
    """Return the sides of a box of the torus, and the pieces of the mesh axes in it."""
    pieces = on_torus(dims, sizes)
    every = [piece for mine in pieces.values() for piece in mine]
    if all(piece.dim != NO_DIM for piece in every):
        sides = [
            math.prod(p.size for p in every if p.dim == d) for d in range(len(dims))
        ]
        return tuple(sides), pieces
    fitting = (
        box
        for box in factorisations(math.prod(sizes), len(dims))
        if all(side <= dim for side, dim in zip(box, dims, strict=True))
    )
    box = min(fitting, key=lambda box: (sum(box), box), default=None)
    return None if box is None else (box, on_torus(box, sizes))


def _order(
    sizes: Sequence[int],
    outer: Sequence[int],
    pieces: dict[int, list[TorusPiece]],
    chip: Sequence[int],
    box: tuple[int, ...],
) -> DeviceOrder:
    last = len(box) - 1
    # (side of the box, place from its outermost part, mesh axis, size)
    parts = [(0, axis, axis, n) for axis, n in enumerate(outer) if n > 1]
    parts += [
        (1 + piece.dim, -piece.stride, axis, piece.size)
        for axis, mine in pieces.items()
        for piece in mine
    ]
    parts += [(last, axis, axis, n) for axis, n in enumerate(chip) if n > 1]
    parts.sort()
    by_axis = sorted(range(len(parts)), key=lambda k: (parts[k][2], parts[k][0]))
    return DeviceOrder(
        box, tuple(part[3] for part in parts), tuple(by_axis), tuple(sizes)
    )


def device_mesh(
    sizes: Sequence[int], devices: Sequence[Any], *, is_staged: bool = False
) -> np.ndarray | None:
    """Return devices in the shape and the order of a mesh; None if no box has as many.

    Args:
      sizes: sizes of the mesh axes, major first.
      devices: the devices to choose from, as many as the mesh has or more.
      is_staged: whether parts of the mesh along its stages run programs of their own. A
        v5e:2x4 is then in the order of JAX, in which halves are hosts of 2 x 2 chips:
        libtpu compiles no program for parts of several hosts.
    """
    from jax.experimental import mesh_utils

    count = math.prod(sizes)
    if any(getattr(d, "coords", None) is None for d in devices):
        return mesh_utils.create_device_mesh(sizes, devices[:count])
    at = _places(devices)
    order = order_on([max(along) + 1 for along in zip(*at, strict=True)], sizes)
    if order is None or any(place not in at for place in np.ndindex(order.box)):
        return None
    if order.box[0] == 1 and (
        max(sizes) == count or (is_staged and order.box == _TWO_HOSTS)
    ):
        box = set(np.ndindex(order.box))
        mine = [d for place, d in at.items() if place in box]
        return mesh_utils.create_device_mesh(sizes, mine)
    found = np.empty(order.box, dtype=object)
    for place in np.ndindex(order.box):
        found[place] = at[place]
    return order.arranged(found)


_TWO_HOSTS = (1, 2, 4, 1, 1)
"""Slices, coordinates in them and devices of a chip, of two hosts of 2 x 2 chips."""


def grid_of(target: Target, count: int) -> tuple[int, ...] | None:
    """Return slices, dims of the torus and devices of a chip; None: no torus.

    Args:
      target: the hardware.
      count: number of devices, where the target does not fix it.
    """
    torus = target.torus
    if torus is None:
        return None
    count = target.num_devices or count
    domains = capacities(target, count)
    at = target.tiers.index(torus)
    cores = domains[at - 1] if at else 1
    dims = torus_dims(torus, max(1, domains[at] // cores))
    return count // domains[at], *dims, cores


def _places(devices: Sequence[Any]) -> dict[tuple[int, ...], Any]:
    """Return the devices by slice, coordinates in it, and number on their chip."""
    slices: dict[int, list[Any]] = {}
    for device in devices:
        slices.setdefault(getattr(device, "slice_index", 0) or 0, []).append(device)
    places = {}
    for number, key in enumerate(sorted(slices)):
        coords = [d.coords for d in slices[key]]
        first = [min(along) for along in zip(*coords, strict=True)]
        for device in slices[key]:
            at = (int(x - low) for x, low in zip(device.coords, first, strict=True))
            places[number, *at, int(getattr(device, "core_on_chip", 0))] = device
    return places
