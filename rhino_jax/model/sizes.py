"""Lists of specs, and how much of a value one device holds under each of them.

Memory traffic of shifts along sharded dims: borders, and the shards that they are
joined to.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from rhino_jax.cost.compute import tile_padding
from rhino_jax.ir.program import Op, Value, item_bytes
from rhino_jax.ir.spec import Spec, local_shape, num_shards, padding_of, shards_per_dim
from rhino_jax.model.constants import CONSTANTS
from rhino_jax.model.strategies import Strategy


class SpecTable:
    """Numbers specs, so that equal lists of specs can share cost tables."""

    def __init__(self) -> None:
        self.specs: list[Spec] = []
        self._ids: dict[Spec, int] = {}
        self._lists: dict[tuple[int, ...], PortSpecs] = {}

    def id_of(self, spec: Spec) -> int:
        found = self._ids.get(spec)
        if found is None:
            found = self._ids[spec] = len(self.specs)
            self.specs.append(spec)
        return found

    def port(self, specs: Sequence[Spec]) -> PortSpecs:
        key = tuple(self.id_of(s) for s in specs)
        found = self._lists.get(key)
        if found is None:
            unique, index = np.unique(
                np.array(key, dtype=np.int64), return_inverse=True
            )
            found = PortSpecs(len(self._lists), tuple(unique.tolist()), index)
            self._lists[key] = found
        return found


@dataclass(frozen=True, slots=True, eq=False)
class PortSpecs:
    """The spec at one port under every option of a node.

    Attributes:
      key: identity among all lists of specs.
      unique: ids of the distinct specs.
      index: option → position in `unique`.
    """

    key: int
    unique: tuple[int, ...]
    index: np.ndarray


@dataclass(slots=True)
class LocalSizes:
    """Sizes of values on one device of a mesh.

    Attributes:
      table: numbers the specs.
      mesh_sizes: sizes of the mesh axes.
      tile: as in `Device`.
      padded_dims: sizes of dims that may be sharded unevenly.
      off_lanes: value id → its dims that never lie on lanes (see `dims_off_lanes`).
    """

    table: SpecTable
    mesh_sizes: tuple[int, ...]
    tile: tuple[int, ...]
    padded_dims: frozenset[int]
    off_lanes: Mapping[int, tuple[int, ...]]
    _paddings: dict[tuple[object, ...], np.ndarray | None] = field(default_factory=dict)
    _held: dict[tuple[object, ...], np.ndarray] = field(default_factory=dict)

    def shares(self, port: PortSpecs) -> np.ndarray:
        """Return [options], the share of the whole value that one device holds, without
        padding."""
        pieces = [shards_per_dim(s, self.mesh_sizes) for s in self._specs(port)]
        return np.array([1 / math.prod(p) for p in pieces])[port.index]

    def held_bytes(
        self, port: PortSpecs, value: Value, off_lanes: tuple[int, ...] | None = None
    ) -> np.ndarray:
        """Return [options], the bytes that a value takes in one device's memory, with
        the padding of uneven shards and of tiles; of its dims that never lie on lanes,
        those that are given, or its own."""
        if off_lanes is None:
            off_lanes = self.off_lanes.get(value.id, ())
        key = port.key, value.shape, value.dtype, off_lanes
        found = self._held.get(key)
        if found is None:
            item = item_bytes(value.dtype)
            unique = []
            for spec in self._specs(port):
                shard = local_shape(spec, value.shape, self.mesh_sizes)
                padding = tile_padding(shard, item, self.tile, off_lanes)
                unique.append(math.prod(shard) * item * padding)
            found = self._held[key] = np.array(unique, dtype=float)[port.index]
        return found

    def paddings(self, port: PortSpecs, shape: tuple[int, ...]) -> np.ndarray | None:
        """Return [distinct specs], the factor by which padding of uneven shards
        enlarges a value of this shape; None where all shards are even."""
        if self.padded_dims.isdisjoint(shape):
            return None
        key = port.key, shape
        if key not in self._paddings:
            specs = self._specs(port)
            found = np.array([padding_of(s, shape, self.mesh_sizes) for s in specs])
            self._paddings[key] = found if (found > 1).any() else None
        return self._paddings[key]

    def shift_bytes(
        self, op: Op, values: Sequence[Value], strategies: Sequence[Strategy]
    ) -> np.ndarray:
        """Return the bytes that an op reads and writes where it shifts along sharded
        dims.

        A border is read, and joined to the shard, in whole tiles: a column takes more
        of them than a row. Where memory is tiled, slices and pads cannot fuse across
        tiles, though they fuse elsewhere: shard and borders are joined in memory, and
        the required part is sliced out (HLO of v5e:2x4, jax 0.10.2; 8 H100 fuse it).

        Args:
          op: the op; it has a rule.
          values: values of the program, by id.
          strategies: strategies of the op.

        Returns:
          [strategies], bytes on one device, for one run.
        """
        found = np.zeros(len(strategies))
        rule = op.rule
        assert rule is not None
        shifts = [f for f, x in enumerate(rule.factors) if x.shift is not None]
        for k, strategy in enumerate(strategies):
            for f in shifts:
                pieces = num_shards(strategy.cut[f], self.mesh_sizes)
                border = rule.factors[f].border(pieces)
                if pieces == 1 or not any(border):
                    continue
                result = values[op.results[0]]
                (d,) = (d for d, dim in enumerate(rule.results[0]) if f in dim)
                shape = local_shape(strategy.made[0], result.shape, self.mesh_sizes)
                item = item_bytes(result.dtype)
                extent = _extent(len(shape) - 1 - d, self.tile, item)
                in_tiles = sum(math.ceil(n / extent) * extent for n in border)
                whole = math.prod(shape) * item
                found[k] += 2 * whole * in_tiles / shape[d]
                if self.tile and op.is_fusible:
                    found[k] += 2 * whole
        return found

    def _specs(self, port: PortSpecs) -> list[Spec]:
        return [self.table.specs[s] for s in port.unique]


def _extent(from_minor: int, tile: Sequence[int], item: int) -> int:
    """Return the elements of a tile along a dim.

    Args:
      from_minor: position of the dim, counted from the minor one.
      tile: as in `Device`; empty where memory has no tiles.
      item: bytes of an element.
    """
    if not tile:
        return max(CONSTANTS.sector_bytes // item, 1) if from_minor == 0 else 1
    return tile[-1 - from_minor] if from_minor < len(tile) else 1
