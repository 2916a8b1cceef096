"""Parse the device groups of collectives and map them to mesh axes.

HLO writes replica groups in three ways, all of them read here:

    {{0,1},{2,3}}                                   a list
    [4,16]<=[16,4]T(1,0)                            a reshaped, transposed iota
    mesh['x'=16,'y'=4], device_ids=(…) {'y'}        axes of a mesh of its own

The ids are positions in the device order of the program, which for a program of
`jax.jit` is the order of the mesh's devices.

`Known` is a state of the replication analysis (`repeated_sums`): the mesh axes along
which a value is replicated.

The state of an array is a set of axes; of a tuple, a state of every element; of an
integer that is computed from the device's id, its value on every device.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
    return _iota(*iota.groups()).reshape(-1)


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


Axes = frozenset[str]
"""Mesh axes along which a value is replicated."""


@dataclass(frozen=True, slots=True)
class Known:
    """Known integers, such as an index that is computed from a device's id.

    Attributes:
      values: one integer per device, in order of their ids; or the elements of a table
        that all devices have.
      is_table: whether `values` is such a table.
      axes: mesh axes along which the value is replicated.
    """

    values: tuple[int, ...]
    is_table: bool
    axes: Axes

    @property
    def is_scalar(self) -> bool:
        """Whether it is one integer on each device."""
        return not self.is_table or len(self.values) == 1

    def at(self, device: int) -> int:
        """Return the integer of a device."""
        return self.values[0 if self.is_table else device]


State = Axes | Known | tuple["State", ...]
"""State of an array, or of every element of a tuple."""

NONE: Axes = frozenset()

_SHARDING = re.compile(r"\bsharding=\{((?:[^{}]|\{[^{}]*\})*)\}")
_TILES = re.compile(
    r"devices=\[([\d,]+)\](?:<=\[([\d,]+)\](?:T\(([\d,]+)\))?|([\d,]+))"
)
_LAST_DIMS = re.compile(r"last_tile_dims=\{([^}]*)\}")


def moved_along(place: tuple[int, ...], at: int, to: int) -> tuple[int, ...]:
    """Return mesh coordinates with another coordinate along one axis."""
    return (*place[:at], to, *place[at + 1 :])


def part(state: State, index: int) -> State:
    """Return the state of one element of a tuple."""
    if isinstance(state, tuple):
        return state[index] if index < len(state) else NONE
    return state


def meet(states: Iterable[State]) -> Axes:
    """Return the axes along which all states and their elements are replicated."""
    found: Axes | None = None
    for state in states:
        axes = meet(state) if isinstance(state, tuple) else axes_of(state)
        found = axes if found is None else found & axes
    return NONE if found is None else found


def axes_of(state: Axes | Known) -> Axes:
    """Return the replicated axes of an array, with known integers or not."""
    return state.axes if isinstance(state, Known) else state


def both(a: State, b: State) -> State:
    """Return the axes that are in both states, element by element."""
    if a == b:
        return a
    if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b):
        return tuple(both(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, tuple) or isinstance(b, tuple):
        return meet([a, b])
    return axes_of(a) & axes_of(b)


def within(state: State, axes: Axes) -> State:
    """Restrict a state to some axes."""
    if isinstance(state, tuple):
        return tuple(within(x, axes) for x in state)
    return state if axes_of(state) <= axes else axes_of(state) & axes


def axes_of_sharding(attributes: str, mesh: MeshMap) -> Axes:
    """Return the replicated axes of an argument, from its printed sharding."""
    found = _SHARDING.search(attributes)
    if found is None:
        return NONE
    text = found.group(1).strip()
    if text == "replicated":
        return frozenset(mesh.names)
    tiles = _TILES.match(text)
    if tiles is None:
        return NONE
    dims = [int(x) for x in tiles.group(1).split(",")]
    devices = iota_devices(*tiles.groups())
    last = _LAST_DIMS.search(text)
    kinds = [x.strip() for x in last.group(1).split(",")] if last else []
    if "last_tile_dim_replicate" in text:
        kinds = ["replicated"]
    tile_of: dict[int, tuple[int, ...]] = {}
    first = len(dims) - len(kinds)
    wanted = [
        d for d in range(len(dims)) if d < first or kinds[d - first] != "replicated"
    ]
    for place, device in zip(np.ndindex(*dims), devices, strict=True):
        tile_of[device] = tuple(place[d] for d in wanted)
    at = {place: tile_of.get(device) for device, place in mesh.coordinates.items()}
    return same_along(at, mesh)


def same_along(at: Mapping[tuple[int, ...], Any], mesh: MeshMap) -> Axes:
    """Return the axes along which a map from mesh coordinates is constant."""
    return frozenset(
        axis
        for i, axis in enumerate(mesh.names)
        if all(x == at[moved_along(place, i, 0)] for place, x in at.items())
    )
