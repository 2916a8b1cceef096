"""`like=`: another function's plan, whose mesh and state layout are taken over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from operator import eq
from pathlib import Path
from typing import Any

from rhino_jax.errors import HardwareError, MeshError, RhinoError
from rhino_jax.frontend.trace import Traced
from rhino_jax.hardware.files import load_target
from rhino_jax.hardware.target import Target
from rhino_jax.ir.program import Program
from rhino_jax.ir.spec import Spec, axes_text
from rhino_jax.ir.transform import Stored
from rhino_jax.plan.kept import Part, reused_blocks, reused_specs, reused_stages
from rhino_jax.plan.plan import AnyPlan, PlanData
from rhino_jax.runtime.meshes import axes_of_mesh, make_mesh
from rhino_jax.runtime.sharded import ShardedFunction


Like = ShardedFunction | PlanData


@dataclass(frozen=True, slots=True)
class ReusedSpecs:
    """Specs, stages and storage that a plan takes over from another plan.

    Attributes:
      source: the plan that they come from, for messages.
      mesh: the mesh of both plans.
      specs: position of an argument array → its fixed spec.
      is_asked: the user gave `like=`; else the source is the function's own last plan.
      places: number of places of each stage of the source along the stage axis.
      stored: argument arrays in interleaved storage, and how.
      stages: position of an argument array → the stages that hold it.
    """

    source: str
    mesh: Any
    specs: Mapping[int, Spec]
    is_asked: bool
    places: tuple[int, ...] = ()
    stored: Stored = field(default_factory=dict)
    stages: Mapping[int, Part] = field(default_factory=dict)

    @classmethod
    def of(
        cls, plan: PlanData, traced: Traced, mesh: Any, what: str, *, is_asked: bool
    ) -> ReusedSpecs:
        """Return what a plan of a traced function takes over from another plan.

        Args:
          plan: the other plan.
          traced: the function to plan.
          mesh: the mesh that the user gave; None: the other plan's.
          what: the public call, for messages.
          is_asked: see the attribute.
        Raises:
          MeshError: `mesh` is given and has other axes than the plan's.
        """
        if mesh is None:
            mesh = plan.mesh
        if mesh is None:
            mesh = make_mesh(plan.mesh_axes, what)
        if axes_of_mesh(mesh) != tuple(plan.mesh_axes):
            raise MeshError(
                f"{what}: mesh= and like= name different meshes.",
                where=f"like=, the plan of `{plan.program_name}`",
                numbers=f"mesh= has {axes_text(axes_of_mesh(mesh))}, like= has"
                f" {axes_text(plan.mesh_axes)}",
                fix="leave out mesh= (the mesh of like= is used), or leave out like=.",
            )
        source = f"like=`{plan.program_name}`" if is_asked else "as before"
        program = traced.program
        specs, stored = reused_specs(plan, program), reused_blocks(plan, program)
        stages = reused_stages(plan, program)
        return cls(source, mesh, specs, is_asked, plan.places, stored, stages)

    def and_of(self, other: PlanData | None, program: Program) -> ReusedSpecs:
        """Return these specs with those that only another plan on this mesh has."""
        if other is None or other.mesh_axes != axes_of_mesh(self.mesh):
            return self
        mine = self.specs.keys()
        stored = {
            at: blocks
            for at, blocks in reused_blocks(other, program).items()
            if at[0] not in mine
        }
        return replace(
            self,
            specs={**reused_specs(other, program), **self.specs},
            stored={**stored, **self.stored},
        )

    def reported_in(self, plan: AnyPlan, program: Program) -> AnyPlan:
        """Return the plan with a note on the fixed specs, and without their pins."""
        kept = {program.inputs[i].path for i in self.specs}
        count = sum(not entry.is_const for entry in program.inputs)
        note = (
            f"{self.source}: the mesh, and the sharding of {len(kept)} of {count}"
            " argument arrays, are kept."
        )
        if self.stages and plan.pipeline is not None:
            mine = (plan.inputs[i] for i in self.stages)
            now = [(leaf.stage, leaf.num_stages) for leaf in mine]
            same = sum(map(eq, now, self.stages.values()))
            note += f" {same} of {len(now)} are in the stages where they were."
        pins = {path: spec for path, spec in plan.pins.items() if path not in kept}
        return replace(plan, pins=pins, notes=(*plan.notes, note))


def check_like(like: Any, what: str) -> None:
    """Refuse a `like=` of a wrong type.

    Raises:
      RhinoError: `like` is neither a sharded function nor a plan.
    """
    if like is None or isinstance(like, Like):
        return
    raise RhinoError(
        f"{what}: like= must be a sharded function or a plan.",
        where="like=",
        numbers=f"got {type(like).__name__}",
        fix="give what `auto_shard` made of the other function, or a `Plan`.",
    )


def plan_of_like(like: Like | None, what: str) -> PlanData | None:
    """Return the plan that `like=` refers to; of a function its last plan.

    Raises:
      RhinoError: the function has not been planned yet.
    """
    if like is None or isinstance(like, PlanData):
        return like
    found = like.last_plan
    if found is not None:
        return found
    name = like.__name__
    raise RhinoError(
        f"{what}: like=`{name}` has no plan yet.",
        where="like=",
        numbers=f"`{name}` was neither called nor planned",
        fix=f"call `{name}` first, or plan it: {name}.plan(*args) takes shapes too.",
    )


def hardware_of_like(like: Like | None) -> str | Path | Target | None:
    """Return the hardware that `like=` was planned for; None: the mesh's own."""
    if not isinstance(like, PlanData):
        return None if like is None else like.hardware
    try:
        return load_target(like.hardware)
    except HardwareError:  # The user gave a file then.
        return None
