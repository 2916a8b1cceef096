"""States of the replication analysis: the mesh axes along which a value is replicated.

The state of an array is a set of axes; of a tuple, a state of every element; of an
integer that is computed from the device's id, its value on every device.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rhino_jax.verify.hlo.collectives.groups import MeshMap, iota_devices


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
