"""How much memory an array takes where memory holds tiles.

On TPU two dims of an array are cut into tiles of 8 rows and 128 lanes, and padded to
whole ones: f32[8,16,16,32,16] takes 8 times its own bytes with its last dim minor.
Which dims are in the tiles is the compiler's choice. Here it is the one that pads
least: layouts that a compiler finds may be worse, none is better.

Source: openxla.org/xla/tiled_layout. Seen in HLO of jax 0.12.0.1, libtpu 0.0.51: rows
are 1, 2, 4 or 8, as few as hold the dim, and no fewer than fill 4 bytes of a column;
vectors lie in 128, 256, 512 or 1,024.
"""

from __future__ import annotations

import functools


@functools.lru_cache(maxsize=1 << 16)
def tile_padding(
    shape: tuple[int, ...],
    item_bytes: int,
    tile: tuple[int, ...],
    off_lanes: tuple[int, ...] = (),
) -> float:
    """How many times its own size an array takes with its padding.

    Args:
      shape: on one device.
      item_bytes: of an element.
      tile: rows and lanes of a tile; empty where memory has no tiles.
      off_lanes: dims that may not lie on lanes, where others may.
    """
    if not tile or not shape or 0 in shape:
        return 1.0
    rows, lanes = tile
    if len(shape) == 1:
        # A vector fills a tile row by row.
        needed = -(-shape[0] // lanes)
        return _padding(shape[0], lanes * min(rows, _power(needed)))
    packed = max(1, 4 // item_bytes)
    across = [_padding(d, lanes) for d in shape]
    down = [_padding(d, max(packed, min(rows, _power(d)))) for d in shape]
    minor = [i for i in range(len(shape)) if i not in off_lanes] or range(len(shape))
    return min(across[i] * down[j] for i in minor for j in range(len(shape)) if i != j)


def _padding(size: int, multiple: int) -> float:
    """How many times its size a dim has when padded to a multiple."""
    return -(-size // multiple) * multiple / size


def _power(size: int) -> int:
    """The least power of two that holds a size."""
    return 1 << (size - 1).bit_length()
