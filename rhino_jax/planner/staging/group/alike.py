"""Groups that do the same are searched once, and steps that nearly do from there."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace

from rhino_jax.hardware.target import Target
from rhino_jax.ir.program import Program, Source
from rhino_jax.planner.meshes import MeshAxes
from rhino_jax.planner.search.driver import find
from rhino_jax.planner.search.found import SearchResult
from rhino_jax.planner.search.records import Request
from rhino_jax.planner.search.remat.choice import Chosen


@dataclass(frozen=True, slots=True, eq=False)
class Finds:
    """What was found for one step, and for its groups.

    Of a loop over layers most stages do the same, to parts of one stack: they differ in
    the paths of what they read, and in the names of their tasks.

    Attributes:
      known: of groups.
      whole: mesh of the largest group → of a whole micro-batch there.
      faster: plan of a group, and whether what loops stack stays → what it had better
        make again, memory left aside.
    """

    known: dict[Hashable, SearchResult] = field(default_factory=dict)
    whole: dict[MeshAxes, SearchResult] = field(default_factory=dict)
    faster: dict[tuple[SearchResult, bool], Chosen | None] = field(default_factory=dict)

    def find_whole(
        self,
        program: Program,
        meshes: Sequence[MeshAxes],
        target: Target,
        request: Request,
    ) -> SearchResult:
        """The search of a whole micro-batch. On one mesh, on which one of another size
        was searched, or one whose loops are whole, it begins with what was found there.

        Args:
          program: of it.
          meshes: of a group, to be compared.
          target: all devices.
          request: the same for all but for the time that is left.
        """
        like = self.whole.get(tuple(meshes[0])) if len(meshes) == 1 else None
        found = find(program, meshes, target, request, like=like, is_estimate=True)
        # The other meshes' problems are not kept.
        best = replace(found, solved=found.solved[:1])
        self.whole.setdefault(found.mesh_axes, best)
        return found

    def find(
        self, program: Program, mesh_axes: MeshAxes, target: Target, request: Request
    ) -> SearchResult:
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

    def of_plan(
        self, found: SearchResult, keeps_stacks: bool, ask: Callable[[], Chosen | None]
    ) -> Chosen | None:
        """What a plan had better make again; asked once for groups that do the same."""
        key = found, keeps_stacks
        if key not in self.faster:
            self.faster[key] = ask()
        return self.faster[key]


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
