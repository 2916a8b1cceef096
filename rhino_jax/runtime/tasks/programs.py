"""The programs of one submesh: each task with the plan's constraints, jitted.

`donated` chooses the arrays that a task donates, and the results that take their
buffers; `held_specs` and `held_bytes` are the shardings and sizes of the values that
stay live on a submesh between its tasks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rhino_jax.cost.compute import tile_padding
from rhino_jax.ir.spec import Spec, even_part, local_shape, replicated
from rhino_jax.passes.staged.group import GroupProgram
from rhino_jax.passes.staged.step import StagedStep, StagedTask, ValueKey, ValueKind
from rhino_jax.plan.decisions import Decisions
from rhino_jax.plan.stages import StagePlan
from rhino_jax.runtime.constraints import spec_on_mesh
from rhino_jax.runtime.interpret import constrained_call


def donated(
    step: StagedStep, of: GroupProgram, task: StagedTask
) -> dict[int, ValueKey]:
    """Return the donated inputs of a task: accumulated sums and replaced state.

    Args:
      step: all tasks of all submeshes.
      of: program of the submesh's tasks.
      task: one of these tasks.
    Returns:
      Position among the arrays that the task reads → the result that takes its buffer.
    """
    replaced = {
        of.arguments[end.state_of]: key
        for key, end in zip(of.results, of.program.outputs, strict=True)
        if end.state_of is not None
    }
    found: dict[int, ValueKey] = {}
    for i, key in enumerate(task.reads):
        made = key if key.kind is ValueKind.SUM else replaced.get(key)
        if made not in task.makes:
            continue
        if key.kind is ValueKind.SUM or _is_free(step, of, task, key):
            found[i] = made
    return found


def _is_free(
    step: StagedStep, of: GroupProgram, task: StagedTask, key: ValueKey
) -> bool:
    """Whether the user donates an input, and nothing reads it later."""
    if key.kind is not ValueKind.INPUT:
        return False
    later = of.tasks[of.tasks.index(task) + 1 :]
    given = any(isinstance(o, tuple) and o[1] == key for o in step.outputs)
    is_read = given or any(key in other.reads for other in later)
    return of.program.inputs[of.arguments.index(key)].is_donated and not is_read


def held_specs(
    of: GroupProgram, decisions: Decisions, sizes: Sequence[int]
) -> dict[ValueKey, Spec]:
    """Return the specs of a submesh's arguments, and of all results of its tasks.

    Arrays between compiled programs are sharded evenly, or along fewer axes.

    Args:
      of: the submesh's tasks as one program.
      decisions: decisions of a plan of that program.
      sizes: sizes of the mesh axes.
    """
    program = of.program
    values = dict(
        zip(of.arguments, (entry.value for entry in program.inputs), strict=True)
    )
    for task, op_id in zip(of.tasks, program.body.ops, strict=True):
        values.update(zip(task.makes, program.ops[op_id].results, strict=True))
    found = {}
    for key, value in values.items():
        shape, spec = program.values[value].shape, decisions.values.get(value)
        if spec is None or len(spec) != len(shape):
            found[key] = replicated(len(shape))
        else:
            found[key] = even_part(spec, shape, sizes)
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


_PACKED = frozenset({"int2", "uint2", "int4", "uint4", "float4_e2m1fn"})
"""Types of less than a byte: compiled programs for CPU refuse arrays of them, as their
layout does not state the bits (JAX 0.10.2); `jax.jit` takes them."""


@dataclass(eq=False)
class Compiled:
    """A task, compiled for the types of the arrays of its first call.

    The compiled program accepts weak and strong types alike, which `jax.jit` compiles
    separately: weights that were filled with a Python number come back with strong
    ones.

    Attributes:
      jitted: the jitted function of the arrays that the task reads.
    """

    jitted: Any
    _compiled: Any = None

    def __call__(self, *arrays: Any) -> Sequence[Any]:
        if self._compiled is None:
            is_packed = any(str(x.dtype) in _PACKED for x in arrays)
            lowered = None if is_packed else self.jitted.lower(*arrays)
            self._compiled = self.jitted if lowered is None else lowered.compile()
        results: Sequence[Any] = self._compiled(*arrays)
        return results

    def lower(self, *shapes: Any) -> jax.stages.Lowered:
        """Lower the task for arrays of these shapes."""
        lowered: jax.stages.Lowered = self.jitted.lower(*shapes)
        return lowered


@dataclass(frozen=True, eq=False)
class GroupPrograms:
    """The programs that one submesh compiles.

    Attributes:
      step: all tasks of all submeshes.
      group: index of the submesh.
      of: the submesh's tasks as one program.
      stage: the plan of the stage.
      mesh: the submesh.
    """

    step: StagedStep
    group: int
    of: GroupProgram
    stage: StagePlan
    mesh: Mesh

    @property
    def sizes(self) -> list[int]:
        """Sizes of the mesh axes."""
        return [size for _, size in self.stage.mesh_axes]

    @cached_property
    def specs(self) -> dict[ValueKey, Spec]:
        """Specs of all values that the submesh holds between tasks."""
        return held_specs(self.of, self.stage.decisions, self.sizes)

    @cached_property
    def shardings(self) -> dict[ValueKey, NamedSharding]:
        types, mesh = self.step.types, self.mesh
        return {
            key: NamedSharding(mesh, spec_on_mesh(spec, types[key].shape, mesh))
            for key, spec in self.specs.items()
        }

    def bytes(self, key: ValueKey, tile: tuple[int, ...] = ()) -> int:
        """Return the bytes of a value on one device; see `held_bytes`."""
        return held_bytes(self.step.types[key], self.specs[key], self.sizes, tile)

    @cached_property
    def everywhere(self) -> NamedSharding:
        """The sharding of values that are replicated over the submesh."""
        return NamedSharding(self.mesh, PartitionSpec())

    def jitted(self, position: int) -> Any:
        """Return a task's jitted function of the arrays that it reads."""
        task = self.of.tasks[position]
        run = constrained_call(
            self.of.closed,
            self.of.program,
            self.stage.decisions,
            self.mesh,
            position,
        )
        run.__name__ = run.__qualname__ = task.name
        return jax.jit(
            run,
            donate_argnums=list(donated(self.step, self.of, task)),
            out_shardings=[self.shardings[key] for key in task.makes],
        )

    @cached_property
    def all(self) -> Sequence[Compiled]:
        return [Compiled(self.jitted(i)) for i in range(len(self.of.tasks))]

    @cached_property
    def in_place(self) -> frozenset[ValueKey]:
        """Results of tasks that are written into donated inputs."""
        found = (donated(self.step, self.of, task).values() for task in self.of.tasks)
        return frozenset().union(*found)

    def replaced(self, position: int) -> list[ValueKey]:
        """Return the state inputs that a task donates."""
        task = self.of.tasks[position]
        reads = [task.reads[i] for i in donated(self.step, self.of, task)]
        return [key for key in reads if key.kind is ValueKind.INPUT]
