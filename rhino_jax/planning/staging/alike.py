"""Groups that do the same are searched once."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace

from rhino_jax.hardware.target import Target
from rhino_jax.ir.program import Program, Source
from rhino_jax.planning.meshes import MeshAxes
from rhino_jax.search.driver import find
from rhino_jax.search.found import Found
from rhino_jax.search.records import Request


@dataclass(frozen=True, slots=True, eq=False)
class Finds:
    """What was found for the groups of one step.

    Of a loop over layers most stages do the same, to parts of one stack: they differ in
    the paths of what they read, and in the names of their tasks.
    """

    known: dict[Hashable, Found] = field(default_factory=dict)

    def find(
        self, program: Program, mesh_axes: MeshAxes, target: Target, request: Request
    ) -> Found:
        """The search of a group, or that of one that does the same.

        Args:
          program: of the group.
          mesh_axes: of its devices.
          target: those; the same for all groups of a mesh.
          request: the same for all groups but for pins and memory.
        """
        key = (
            _without_names(program),
            tuple(mesh_axes),
            frozenset(request.pins.items()),
            frozenset(request.output_pins.items()),
            frozenset(request.value_pins.items()),
            request.memory_budget_bytes,
        )
        if key not in self.known:
            self.known[key] = find(program, [mesh_axes], target, request)
        return self.known[key]


def _without_names(program: Program) -> Program:
    """A group's program without what its inputs, results and tasks are called."""
    tasks = {*program.body.ops}
    return replace(
        program,
        name="",
        ops=tuple(
            replace(op, source=Source(), label="") if op.id in tasks else op
            for op in program.ops
        ),
        inputs=tuple(replace(end, path="") for end in program.inputs),
        outputs=tuple(replace(end, path="") for end in program.outputs),
    )
