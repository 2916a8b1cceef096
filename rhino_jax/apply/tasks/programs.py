"""The programs of one group: each task with the plan's constraints, jitted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rhino_jax.apply.constraints import partition_spec
from rhino_jax.apply.interpret import constrained_call
from rhino_jax.apply.tasks.held import held_specs
from rhino_jax.plan.stages import StagePlan
from rhino_jax.transform.staged.group import GroupProgram
from rhino_jax.transform.staged.step import Key, Kind, Step, Task


@dataclass(frozen=True, eq=False)
class Programs:
    """What one group compiles.

    Attributes:
      step: all tasks of all groups.
      group: which.
      of: its tasks as one program.
      stage: as it was planned.
      mesh: its devices.
    """

    step: Step
    group: int
    of: GroupProgram
    stage: StagePlan
    mesh: Mesh

    @cached_property
    def shardings(self) -> dict[Key, NamedSharding]:
        """Of every value that the group has between tasks."""
        types, mesh = self.step.types, self.mesh
        return {
            key: NamedSharding(mesh, partition_spec(spec, types[key].shape, mesh))
            for key, spec in held_specs(self.of, self.stage.decisions).items()
        }

    @cached_property
    def everywhere(self) -> NamedSharding:
        """Of what all devices of the group hold whole."""
        return NamedSharding(self.mesh, PartitionSpec())

    def jitted(self, position: int) -> Any:
        """A task, to be called with the arrays that it reads."""
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
            donate_argnums=self._donated(task),
            out_shardings=[self.shardings[key] for key in task.makes],
        )

    @cached_property
    def all(self) -> Sequence[Any]:
        return [self.jitted(i) for i in range(len(self.of.tasks))]

    def _donated(self, task: Task) -> list[int]:
        """Sums that are added to, and state that is replaced."""
        program = self.of.program
        replaced = {
            self.of.arguments[end.state_of]: key
            for key, end in zip(self.of.results, program.outputs, strict=True)
            if end.state_of is not None
        }
        found = []
        for i, key in enumerate(task.reads):
            if key.kind is Kind.SUM:
                is_last = key in task.makes
            elif key.kind is Kind.INPUT and replaced.get(key) in task.makes:
                entry = program.inputs[self.of.arguments.index(key)]
                is_last = entry.is_donated and not self._is_read_later(task, key)
            else:
                is_last = False
            if is_last:
                found.append(i)
        return found

    def replaced(self, position: int) -> list[Key]:
        """State that a task consumes."""
        task = self.of.tasks[position]
        reads = [task.reads[i] for i in self._donated(task)]
        return [key for key in reads if key.kind is Kind.INPUT]

    def _is_read_later(self, task: Task, key: Key) -> bool:
        later = self.of.tasks[self.of.tasks.index(task) + 1 :]
        given = any(isinstance(o, tuple) and o[1] == key for o in self.step.outputs)
        return given or any(key in other.reads for other in later)
