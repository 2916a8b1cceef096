"""Arithmetic of grouped matmuls: of the kernel for GPUs (`rhino_jax.runtime.grouped`),
and of XLA:TPU's.

A tile has rows of a single group, so that the last tile of a group is partly empty, and
multiplied all the same: half a tile of each group on average.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


ROWS, MATRICES = "grouped_rows", "grouped_matrices"
"""Names of the kernels, with a result per row, and per matrix; behind them stands the
number of groups: "grouped_rows_256"."""


@dataclass(frozen=True, slots=True)
class GroupTiles:
    """Tiles of grouped matmuls.

    Attributes:
      min_rows: rows of a tile of the kernel for GPUs, at least: those of Triton's
        smallest product (`tl.dot`).
      max_rows: rows of such a tile, at most: the height of XLA:GPU's usual tiles of a
        matmul.
      bytes: bytes of such a tile along the contracted dim: a line of the cache.
      aligned_rows: rows of a tile of XLA:TPU's kernel, which start at multiples of it:
        128, or 256 where groups have 1,024 rows (`iteration_bounds` in the HLO of 64
        and 256 groups, 8,192 and 65,536 rows, forward and gradients: v5e, v6e, tpu7x;
        `ragged_dot_tiling` on v5p; libtpu 0.0.52).
    """

    min_rows: int = 16
    max_rows: int = 128
    bytes: int = 128
    aligned_rows: int = 128


TILES = GroupTiles()


def group_tile(rows: Any, groups: int, item_bytes: int, of_matrices: bool) -> Any:
    """Return the rows of a tile: a power of two, at most half of the mean group.

    Args:
      rows: number of rows, or an array of them.
      groups: number of groups.
      item_bytes: bytes of an element.
      of_matrices: whether the rows are contracted.
    """
    half = np.maximum(np.asarray(rows) // (2 * groups), 1)
    most = TILES.bytes // item_bytes if of_matrices else TILES.max_rows
    return np.clip(1 << np.log2(half).astype(int), TILES.min_rows, most)


def tiled_rows(rows: Any, groups: int, tile: Any) -> Any:
    """Return the rows that are multiplied, on average over where groups end.

    Args:
      rows: number of rows, or an array of them.
      groups: number of groups.
      tile: rows of a tile, or an array of them.
    """
    return rows + np.minimum(rows, groups) * (tile - 1) / 2


def aligned_rows(rows: Any, groups: int) -> Any:
    """Return the rows that XLA:TPU multiplies: a tile where a group ends, and another
    begins, counts for both.

    Args:
      rows: number of rows, or an array of them.
      groups: number of groups.
    """
    return rows + np.minimum(rows, groups) * TILES.aligned_rows
