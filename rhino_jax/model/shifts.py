"""Memory traffic of shifts along sharded dims: borders, and the shards that they are
joined to."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from rhino_jax.ir.program import Op, Value, item_bytes
from rhino_jax.ir.spec import local_shape
from rhino_jax.model.pricing import PRICING
from rhino_jax.model.strategies import Strategy


def shift_bytes(
    op: Op,
    values: Sequence[Value],
    strategies: Sequence[Strategy],
    mesh_sizes: Sequence[int],
    tile: Sequence[int],
) -> np.ndarray:
    """Return the bytes that an op reads and writes where it shifts along sharded dims.

    A border is read, and joined to the shard, in whole tiles: a column takes more of
    them than a row. Where memory is tiled, slices and pads cannot fuse across tiles,
    though they fuse elsewhere: shard and borders are joined in memory, and the required
    part is sliced out (HLO of v5e:2x4, jax 0.10.2; 8 H100 fuse it).

    Args:
      op: the op; it has a rule.
      values: values of the program, by id.
      strategies: strategies of the op.
      mesh_sizes: sizes of the mesh axes.
      tile: as in `Device`.

    Returns:
      [strategies], bytes on one device, for one run.
    """
    found = np.zeros(len(strategies))
    rule = op.rule
    shifts = [
        f for f, x in enumerate(rule.factors if rule else ()) if x.shift is not None
    ]
    if rule is None or not shifts:
        return found
    sizes = tuple(mesh_sizes)
    for k, strategy in enumerate(strategies):
        for f in shifts:
            pieces = math.prod(sizes[a] for a in strategy.cut[f])
            border = rule.factors[f].border(pieces)
            if pieces == 1 or not any(border):
                continue
            result = values[op.results[0]]
            (d,) = (d for d, dim in enumerate(rule.results[0]) if f in dim)
            shape = local_shape(strategy.made[0], result.shape, sizes)
            item = item_bytes(result.dtype)
            extent = _extent(len(shape) - 1 - d, tile, item)
            in_tiles = sum(math.ceil(n / extent) * extent for n in border)
            whole = math.prod(shape) * item
            found[k] += 2 * whole * in_tiles / shape[d]
            if tile and op.is_fusible:
                found[k] += 2 * whole
    return found


def _extent(from_minor: int, tile: Sequence[int], item: int) -> int:
    """Return the elements of a tile along a dim.

    Args:
      from_minor: position of the dim, counted from the minor one.
      tile: as in `Device`; empty where memory has no tiles.
      item: bytes of an element.
    """
    if not tile:
        return max(PRICING.sector_bytes // item, 1) if from_minor == 0 else 1
    return tile[-1 - from_minor] if from_minor < len(tile) else 1
