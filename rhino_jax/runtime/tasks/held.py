"""How a group holds what passes from task to task."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rhino_jax.cost.tiles import tile_padding
from rhino_jax.ir.spec import Spec, local_shape, replicated
from rhino_jax.passes.staged.group import GroupProgram
from rhino_jax.passes.staged.step import ValueKey
from rhino_jax.plan.decisions import Decisions


def held_specs(of: GroupProgram, decisions: Decisions) -> dict[ValueKey, Spec]:
    """The specs of a group's arguments, and of all that its tasks make.

    Args:
      of: the group's tasks as one program.
      decisions: of a plan of that program.
    """
    program = of.program
    values = dict(
        zip(of.arguments, (entry.value for entry in program.inputs), strict=True)
    )
    for task, op_id in zip(of.tasks, program.body.ops, strict=True):
        values.update(zip(task.makes, program.ops[op_id].results, strict=True))
    found = {}
    for key, value in values.items():
        rank, spec = program.values[value].rank, decisions.values.get(value)
        is_said = spec is not None and len(spec) == rank
        found[key] = spec if is_said and spec is not None else replicated(rank)
    # What leaves the group leaves it as the plan's results are.
    found.update(zip(of.results, decisions.outputs, strict=True))
    return found


def held_bytes(
    aval: Any, spec: Spec, sizes: Sequence[int], tile: tuple[int, ...] = ()
) -> int:
    """What one device holds of a value.

    Args:
      aval: its shape and dtype.
      spec: how it is laid out.
      sizes: of the mesh's axes.
      tile: of the device's memory; see `hardware.target.Device`.
    """
    item = getattr(aval.dtype, "itemsize", 4)
    shard = local_shape(spec, aval.shape, sizes)
    return math.ceil(math.prod(shard) * item * tile_padding(shard, item, tile))
