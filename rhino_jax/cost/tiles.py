"""Memory of an array in tiled layouts.

On TPU two dims of an array are divided into tiles of 8 rows and 128 lanes, and padded
to whole tiles: f32[8,16,16,32,16] takes 8 times its own bytes with its last dim minor.
The compiler chooses which dims are tiled. The choice here is the one with the least
padding: the compiler's layouts may be worse, none is better.

Source: openxla.org/xla/tiled_layout. Seen in HLO of jax 0.12.0.1, libtpu 0.0.51: tiles
have 1, 2, 4 or 8 rows, as few as hold the dim, and enough to fill 4 bytes of a column;
tiles of vectors have 128, 256, 512 or 1,024 elements.
"""

from __future__ import annotations

import functools
from typing import Any


@functools.lru_cache(maxsize=1 << 16)
def tile_padding(
    shape: tuple[int, ...],
    item_bytes: int,
    tile: tuple[int, ...],
    off_lanes: tuple[int, ...] = (),
) -> float:
    """Return the ratio of an array's padded size to its own size.

    Args:
      shape: shape of the shard on one device.
      item_bytes: bytes of an element.
      tile: rows and lanes of a tile; empty where memory has no tiles.
      off_lanes: dims that may not be the minor one (on lanes), unless all dims are
        listed.
    """
    if not tile or not shape or 0 in shape:
        return 1.0
    rows, lanes = tile
    if len(shape) == 1:
        # A vector fills a tile row by row.
        needed = -(-shape[0] // lanes)
        return padding(shape[0], lanes * min(rows, _power(needed)))
    packed = max(1, 4 // item_bytes)
    across = [padding(d, lanes) for d in shape]
    down = [padding(d, max(packed, min(rows, _power(d)))) for d in shape]
    minor = [i for i in range(len(shape)) if i not in off_lanes] or range(len(shape))
    return min(across[i] * down[j] for i in minor for j in range(len(shape)) if i != j)


def padding(size: Any, multiple: int) -> Any:
    """Return the ratio of sizes padded to a multiple to the sizes themselves."""
    return -(-size // multiple) * multiple / size


def _power(size: int) -> int:
    """Return the smallest power of two that is at least `size`."""
    return 1 << (size - 1).bit_length()
