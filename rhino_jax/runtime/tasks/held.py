"""Shardings and sizes of the values that a submesh holds between its tasks."""

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
    """Return the specs of a submesh's arguments, and of all results of its tasks.

    Args:
      of: the submesh's tasks as one program.
      decisions: decisions of a plan of that program.
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
    # Results of the program have the plan's output specs.
    found.update(zip(of.results, decisions.outputs, strict=True))
    return found


def held_bytes(
    aval: Any, spec: Spec, sizes: Sequence[int], tile: tuple[int, ...] = ()
) -> int:
    """Return the bytes of a value on one device.

    Args:
      aval: shape and dtype of the value.
      spec: spec of the value.
      sizes: sizes of the mesh axes.
      tile: memory tile of the device, for padding; see `hardware.target.Device`.
    """
    item = getattr(aval.dtype, "itemsize", 4)
    shard = local_shape(spec, aval.shape, sizes)
    return math.ceil(math.prod(shard) * item * tile_padding(shard, item, tile))
