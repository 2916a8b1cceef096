"""The programs of one submesh: each task with the plan's constraints, jitted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rhino_jax.ir.spec import Spec
from rhino_jax.passes.staged.group import GroupProgram
from rhino_jax.passes.staged.step import StagedStep, ValueKey, ValueKind
from rhino_jax.plan.stages import StagePlan
from rhino_jax.runtime.constraints import partition_spec
from rhino_jax.runtime.interpret import constrained_call
from rhino_jax.runtime.tasks.donated import donated
from rhino_jax.runtime.tasks.held import held_bytes, held_specs


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
            self._compiled = self.jitted.lower(*arrays).compile()
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

    @cached_property
    def specs(self) -> dict[ValueKey, Spec]:
        """Specs of all values that the submesh holds between tasks."""
        return held_specs(self.of, self.stage.decisions)

    @cached_property
    def shardings(self) -> dict[ValueKey, NamedSharding]:
        types, mesh = self.step.types, self.mesh
        return {
            key: NamedSharding(mesh, partition_spec(spec, types[key].shape, mesh))
            for key, spec in self.specs.items()
        }

    def bytes(self, key: ValueKey, tile: tuple[int, ...] = ()) -> int:
        """Return the bytes of a value on one device; see `held_bytes`."""
        sizes = [size for _, size in self.stage.mesh_axes]
        return held_bytes(self.step.types[key], self.specs[key], sizes, tile)

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
