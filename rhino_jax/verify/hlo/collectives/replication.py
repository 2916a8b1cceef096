"""Along which mesh axes a value is the same on all devices.

Of an array that is a set of axes; of a tuple, one of every part; of an integer that is
computed from the device's number, its value on every device.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rhino_jax.verify.hlo.collectives.groups import MeshMap, iota_devices


Axes = frozenset[str]
"""Mesh axes along which a value is the same on all devices."""


@dataclass(frozen=True, slots=True)
class Known:
    """Integers that are known: an index that is computed from a device's number.

    Attributes:
      values: of every device, in order of their numbers, an integer; or, of a table
        that all have, its elements.
      is_table: which of these.
      axes: mesh axes along which it is the same.
    """

    values: tuple[int, ...]
    is_table: bool
    axes: Axes

    @property
    def is_scalar(self) -> bool:
        """Whether it is one integer on each device."""
        return not self.is_table or len(self.values) == 1

    def at(self, device: int) -> int:
        """The integer of a device."""
        return self.values[0 if self.is_table else device]


State = Axes | Known | tuple["State", ...]
"""State of an array, or of every part of a tuple."""

NONE: Axes = frozenset()

_SHARDING = re.compile(r"\bsharding=\{((?:[^{}]|\{[^{}]*\})*)\}")
_TILES = re.compile(
    r"devices=\[([\d,]+)\](?:<=\[([\d,]+)\](?:T\(([\d,]+)\))?|([\d,]+))"
)
_LAST_DIMS = re.compile(r"last_tile_dims=\{([^}]*)\}")


def moved_along(place: tuple[int, ...], at: int, to: int) -> tuple[int, ...]:
    """Return a place with another coordinate along one axis."""
    return (*place[:at], to, *place[at + 1 :])


def part(state: State, index: int) -> State:
    """Return the state of one part of a tuple."""
    if isinstance(state, tuple):
        return state[index] if index < len(state) else NONE
    return state


def meet(states: Iterable[State]) -> Axes:
    """Axes along which all of these, and all parts of them, are the same."""
    found: Axes | None = None
    for state in states:
        axes = meet(state) if isinstance(state, tuple) else axes_of(state)
        found = axes if found is None else found & axes
    return NONE if found is None else found


def axes_of(state: Axes | Known) -> Axes:
    """Return the axes of an array, known or not."""
    return state.axes if isinstance(state, Known) else state


def both(a: State, b: State) -> State:
    """Return what holds in both states, part by part."""
    if a == b:
        return a
    if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b):
        return tuple(both(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, tuple) or isinstance(b, tuple):
        return meet([a, b])
    return axes_of(a) & axes_of(b)


def within(state: State, axes: Axes) -> State:
    """Restrict a state to these axes."""
    if isinstance(state, tuple):
        return tuple(within(x, axes) for x in state)
    return state if axes_of(state) <= axes else axes_of(state) & axes


def axes_of_sharding(attributes: str, mesh: MeshMap) -> Axes:
    """Axes along which an argument is the same, by its sharding as HLO prints it."""
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
    """Axes along which what is at each place of a mesh is the same."""
    return frozenset(
        axis
        for i, axis in enumerate(mesh.names)
        if all(x == at[moved_along(place, i, 0)] for place, x in at.items())
    )
