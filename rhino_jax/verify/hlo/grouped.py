"""The arithmetic of the grouped matmul of GPUs (`rhino_jax.runtime.grouped`), from the
calls of its Triton kernels."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rhino_jax.cost.grouped import MATRICES, ROWS, group_tile, tiled_rows
from rhino_jax.verify.hlo.module import HloArray, Instruction, arrays_of


TRITON = "__gpu$xla.gpu.triton"
"""The target of these calls, and of all Pallas kernels in Triton."""

_KERNEL = re.compile(rf'\bname = "((?:{ROWS}|{MATRICES})_\d+_\d+)"')


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
    groups, parts = map(int, kernel.split("_")[-2:])
    count, depth = rows.dims[0] // parts, rows.dims[1]
    tile = group_tile(count, groups, rows.item_bytes, kernel.startswith(MATRICES))
    return round(2 * tiled_rows(count, groups, tile) * depth * result.dims[-1])
