"""The arithmetic of grouped matmuls: of the Triton kernels of
`rhino_jax.runtime.grouped`, and of XLA:TPU's ragged dots.

A ragged dot of XLA:TPU is a fusion that skips the tiles of other groups, or a Mosaic
kernel (v5p). Tiles start at multiples of their rows: a tile in which groups meet is
visited for each.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from rhino_jax.cost.grouped import MATRICES, ROWS, group_tile, tiled_rows
from rhino_jax.verify.hlo.module import HloArray, Instruction, arrays_of


TRITON = "__gpu$xla.gpu.triton"
"""The target of these calls, and of all Pallas kernels in Triton."""

_RAGGED = re.compile(
    r'"is_ragged_dot":true,"num_groups_in_ragged_dot":"(\d+)".*'
    r'"iteration_skipper_mode":"ITERATION_SKIPPER_MODE_GROUP_STARTS"'
)
_BOUNDS = re.compile(r'"iteration_bounds":\[([\d",]*)\]')
_TILING = re.compile(r'ragged_dot_tiling="(\d+)')

_KERNEL = re.compile(rf'\bname = "((?:{ROWS}|{MATRICES})_\d+)"')


def grouped_flops(
    instruction: Instruction, operands: Sequence[tuple[HloArray, ...]]
) -> int | None:
    """Return the FLOPs of a call; None for other kernels.

    Args:
      instruction: the call.
      operands: types of its operands: where groups or tiles begin and end, the rows,
        and the matrices or the other rows.
    """
    kernel = instruction.find(_KERNEL)
    if not kernel:
        return None
    (rows,), (result,) = operands[-2], arrays_of(instruction.type)
    groups, (count, depth) = int(kernel.rpartition("_")[2]), rows.dims
    tile = group_tile(count, groups, rows.item_bytes, kernel.startswith(MATRICES))
    return round(2 * tiled_rows(count, groups, tile) * depth * result.dims[-1])


def skips_groups(instruction: Instruction) -> bool:
    """Whether an instruction is a ragged dot that skips the tiles of other groups.

    libtpu's estimate of its cycles counts all groups, and the zeros between the
    elements of the dilated input that it writes them as: it grows with the square of
    their number.
    """
    return bool(instruction.find(_RAGGED))


def ragged_work(
    instruction: Instruction, operands: Sequence[tuple[HloArray, ...]]
) -> float:
    """Return the share of a ragged dot's stated work that XLA:TPU does; 1 for others.

    Args:
      instruction: a fusion, whose work is stated as if every group had all rows; or a
        call, whose work is that of every row once.
      operands: types of its operands.
    """
    if groups := int(instruction.find(_RAGGED) or 0):
        bounds = instruction.find(_BOUNDS).replace('"', "").split(",")
        tiles = math.prod(int(n) for n in bounds if n) // groups
        visited = tiles + groups - 1 if tiles else 1.0
        return visited / (max(tiles, 1) * groups)
    if tile := int(instruction.find(_TILING) or 0):
        rows = next(a.dims[0] for (a, *_) in operands if len(a.dims) > 1)
        visits = max(a.dims[0] for (a, *_) in operands if len(a.dims) == 1)
        return visits * tile / rows
    return 1.0
