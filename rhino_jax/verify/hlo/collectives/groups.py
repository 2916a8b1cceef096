"""Parse the device groups of collectives and map them to mesh axes.

HLO writes replica groups in three ways, all of them read here:

    {{0,1},{2,3}}                                   a list
    [4,16]<=[16,4]T(1,0)                            a reshaped, transposed iota
    mesh['x'=16,'y'=4], device_ids=(…) {'y'}        axes of a mesh of its own

The ids are positions in the device order of the program, which for a program of
`jax.jit` is the order of the mesh's devices.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rhino_jax.errors import MeshError


Groups = tuple[tuple[int, ...], ...]

_IOTA = r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?"
_IOTA_GROUPS = re.compile(r"replica_groups=" + _IOTA)
_LIST_GROUPS = re.compile(r"replica_groups=\{((?:\{[\d, ]*\},?\s*)*)\}")
_MESH_GROUPS = re.compile(
    r"replica_groups=@?mesh\[([^\]]*)\]"
    r"(?:,\s*device_ids=\(((?:[^()]|\([\d,]*\))*)\))?\s*\{([^}]*)\}"
)
_MESH_AXIS = re.compile(r"""['"]?([^'",=]+)['"]?=(\d+)""")
_SUB_AXIS = re.compile(r"""['"]?([^'",:]+)['"]?(?::\((\d+)\)(\d+))?['"]?(?:,|$)""")
_DEVICE_IOTA = re.compile(r"^\[([\d,]+)\](?:<=\[([\d,]+)\])?(?:T\(([\d,]+)\))?$")
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{[\d, ]*\},?\s*)*)\}")


def parse_groups(attributes: str, num_devices: int) -> Groups:
    """Parse the replica groups in an instruction's attributes.

    Args:
      attributes: text after the operands.
      num_devices: number of devices of the program; empty groups mean all of them.
    """
    if (found := _IOTA_GROUPS.search(attributes)) is not None:
        return _rows(_iota(*found.groups()))
    if (found := _MESH_GROUPS.search(attributes)) is not None:
        return _mesh_groups(*found.groups())
    if (found := _LIST_GROUPS.search(attributes)) is not None:
        groups = tuple(_ints(x) for x in re.findall(r"\{([\d, ]*)\}", found.group(1)))
        if groups:
            return groups
    elif "replica_groups=" in attributes:
        raise ValueError(f"cannot read the replica groups in {attributes[:200]!r}")
    return (tuple(range(num_devices)),)


def parse_pairs(attributes: str) -> tuple[tuple[int, int], ...]:
    """Parse the (source, target) pairs of a collective-permute."""
    found = _PAIRS.search(attributes)
    if found is None:
        raise ValueError(f"no source_target_pairs in {attributes[:200]!r}")
    pairs = [_ints(x) for x in re.findall(r"\{([\d, ]*)\}", found.group(1))]
    return tuple((a, b) for a, b in pairs)


def _ints(text: str | None) -> tuple[int, ...]:
    return tuple(int(x) for x in (text or "").split(",") if x.strip())


def _rows(array: np.ndarray) -> Groups:
    return tuple(tuple(int(x) for x in row) for row in array)


def _iota(dims: str, reshape: str | None, transpose: str | None) -> np.ndarray:
    """Return `[dims]<=[reshape]T(transpose)`: iota, reshape, transpose, reshape."""
    start = _ints(reshape) or _ints(dims)
    array = np.arange(math.prod(start)).reshape(start)
    if transpose:
        array = array.transpose(_ints(transpose))
    return array.reshape(_ints(dims))


def iota_devices(
    dims: str, reshape: str | None, transpose: str | None, listed: str | None
) -> tuple[int, ...]:
    """Return the devices of a tiled sharding in tile order, from iota or list."""
    if listed:
        return _ints(listed)
    return tuple(int(x) for x in _iota(dims, reshape, transpose).reshape(-1))


def _mesh_groups(axes: str, device_ids: str | None, over: str) -> Groups:
    named = [(name.strip(), int(size)) for name, size in _MESH_AXIS.findall(axes)]
    sizes = [size for _, size in named]
    devices = _mesh_devices(device_ids, sizes)
    # A sub-axis 'x':(pre)size is the middle part of x split into pre, size, rest.
    split: list[int] = []
    place: dict[tuple[str, int], int] = {}
    wanted = [
        (n.strip(), int(p or 0), int(s or 0)) for n, p, s in _SUB_AXIS.findall(over)
    ]
    for name, size in named:
        cuts = {1, size}
        for other, pre, sub in wanted:
            if other == name and sub:
                cuts |= {pre, pre * sub}
        edges = sorted(cuts)
        for low, high in itertools.pairwise(edges):
            place[name, low] = len(split)
            split.append(high // low)
        if size == 1:
            place[name, 1] = len(split)
            split.append(1)
    chosen: list[int] = []
    whole = dict(named)
    for name, pre, sub in wanted:
        if name not in whole:
            raise ValueError(f"replica groups over {name!r}, which the mesh has not")
        low, high = (pre, pre * sub) if sub else (1, max(2, whole[name]))
        chosen += [p for (n, at), p in place.items() if n == name and low <= at < high]
    rest = [i for i in range(len(split)) if i not in chosen]
    table = devices.reshape(split).transpose([*rest, *chosen])
    return _rows(table.reshape(-1, math.prod(split[i] for i in chosen)))


def _mesh_devices(text: str | None, sizes: Sequence[int]) -> np.ndarray:
    if not text:
        return np.arange(math.prod(sizes))
    iota = _DEVICE_IOTA.match(text.strip())
    if iota is None:
        return np.array(_ints(text))
    dims, reshape, transpose = iota.groups()
    if reshape:
        return _iota(dims, reshape, transpose).reshape(-1)
    array = np.arange(math.prod(_ints(dims))).reshape(_ints(dims))
    return (array.transpose(_ints(transpose)) if transpose else array).reshape(-1)


@dataclass(frozen=True, slots=True)
class MeshMap:
    """A map from a program's devices to coordinates in a mesh.

    Attributes:
      names: axis names, major first.
      sizes: axis sizes.
      coordinates: device id → its coordinate along every axis.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    coordinates: dict[int, tuple[int, ...]]

    @property
    def num_devices(self) -> int:
        return math.prod(self.sizes)

    def axes_of(self, groups: Groups) -> tuple[tuple[str, ...], bool]:
        """Return the axes that groups (or pairs) span, and whether they cover each.

        A group that contains only part of an axis (half of the devices along it) spans
        that axis, but does not cover it.
        """
        moved: set[int] = set()
        for group in groups:
            moved |= self._moved(group)
        axes = sorted(moved)
        whole = math.prod(self.sizes[a] for a in axes)
        return tuple(self.names[a] for a in axes), all(len(g) == whole for g in groups)

    def _moved(self, group: Sequence[int]) -> set[int]:
        """Return the positions of the axes along which members of a group differ."""
        try:
            places = [self.coordinates[d] for d in group]
        except KeyError as error:
            raise MeshError(
                "reading collectives: the compiled program runs on other devices"
                " than the mesh's.",
                numbers=f"device {error.args[0]} in a replica group;"
                f" the mesh has {self.num_devices} devices",
                fix="give the mesh_axes and device_ids of the mesh it is compiled for.",
            ) from None
        return {
            axis
            for axis in range(len(self.sizes))
            if len({place[axis] for place in places}) > 1
        }


def map_mesh(
    mesh_axes: Sequence[tuple[str, int]], device_ids: Sequence[int] | None = None
) -> MeshMap:
    """Return the map from a program's devices to mesh coordinates.

    Args:
      mesh_axes: (name, size) of every axis, major first.
      device_ids: ids of the devices in mesh order (`mesh.devices.flat`), as replica
        groups use them; None: 0, 1, 2, ….
    """
    names = tuple(name for name, _ in mesh_axes)
    sizes = tuple(size for _, size in mesh_axes)
    ids = range(math.prod(sizes)) if device_ids is None else device_ids
    places = itertools.product(*(range(n) for n in sizes))
    return MeshMap(names, sizes, dict(zip(ids, places, strict=True)))
