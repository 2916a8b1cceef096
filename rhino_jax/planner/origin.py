"""Other plans of a function: one whose mesh and state layout are taken over (`like=`),
and the origin of a plan, for `plan.with_` and `rhino_jax.explain.questions`.

A plan made in this process refers to its traced function and to the options that it was
requested with. The most recent solved problems are cached as well (`MAX_KEPT`, since
those of large programs are large); for any other plan, such as one from the plan cache,
the problem on its mesh is solved again when it is first needed. A plan from a file has
no origin.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from operator import eq
from pathlib import Path
from typing import Any

from rhino_jax.attention.sites import sites_of
from rhino_jax.errors import HardwareError, MeshError, RhinoError
from rhino_jax.frontend.trace import Traced
from rhino_jax.hardware.files import load_target
from rhino_jax.hardware.target import Target
from rhino_jax.ir.program import Program
from rhino_jax.ir.spec import Spec, axes_text
from rhino_jax.ir.transform import Stored
from rhino_jax.plan import plan as data
from rhino_jax.plan.form_pins import without_forms
from rhino_jax.plan.kept import Part, reused_blocks, reused_specs, reused_stages
from rhino_jax.plan.pin_trees import check_pins, expand_pins
from rhino_jax.plan.plan import AnyPlan, PlanData
from rhino_jax.plan.resolved_pins import ResolvedPins, resolve_pins
from rhino_jax.planner.meshes import without_stages
from rhino_jax.planner.notes import (
    notes_of_arguments,
    notes_of_microbatches,
    notes_of_rules,
)
from rhino_jax.runtime.meshes import axes_of_mesh, make_mesh, read_mesh
from rhino_jax.runtime.sharded import ShardedFunction, with_trees
from rhino_jax.utils.progress import shown


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


MAX_KEPT = 2
"""Maximum number of cached solved problems: a plan's, and its derived plan's."""

_SOLVED: deque[PlanOrigin] = deque()


@dataclass(slots=True, eq=False)
class PlanOrigin:
    """The function, options and solved problem that a plan was made from.

    Attributes:
      plan_options: the options that the plan was requested with
        (`rhino_jax.planner.options.PlanOptions`).
      traced: the traced function.
      mesh: the mesh as the user gave it; None: rhino chose it.
      basis: the specs that the plan takes over from another plan; None: none.
      solved: the problem and its solution, while cached: `variant_search.Solved`; for
        pipeline stages `staging.fitted.SolvedStages`, or `SolvedInOne` for an SPMD
        pipeline; None: not solved yet, or dropped from the cache.
    """

    plan_options: Any
    traced: Traced
    mesh: Any
    basis: ReusedSpecs | None
    solved: Any = None

    def with_(self, plan: data.PlanData, changes: Mapping[str, Any]) -> data.PlanData:
        """See `Plan.with_`."""
        changes = {k: v for k, v in changes.items() if v is not None}
        plan_options, mesh = self.plan_options, changes.pop("mesh", None)
        if "pins" in changes:
            more = check_pins("`plan.with_`", changes["pins"])
            own = expand_pins(plan_options.pins, self.traced)
            changes["pins"] = {**own, **expand_pins(more, self.traced)}
        plan_options = replace(plan_options, what="`plan.with_`", **changes)
        is_here = mesh is None and changes.keys() <= {"pins", "memory_budget_bytes"}
        if is_here and not plan_options.refine:
            found = self._replanned(plan, plan_options)
            if found is not None:
                return found
        if mesh is not None:
            mesh = read_mesh(mesh, "`plan.with_`")
            other = replace(plan_options, like=None)
            found = other.plan_with(self.traced, mesh, None)
        else:
            is_anew = "stages" in changes
            given = self.mesh if is_anew else plan.mesh
            basis, places = (None, ()) if is_anew else (self.basis, plan.places)
            found = plan_options.plan_with(self.traced, given, basis, places)
        return found

    def solved_for(self, plan: data.PlanData) -> Any:
        """Return the problem that gave a plan, solved again if it is not cached."""
        found = self.solved
        if found is None:
            found = self.solved = self._solve(plan)
        _keep(self)
        return found

    def _solve(self, plan: data.PlanData) -> Any:
        from rhino_jax.planner.cuts import as_requested
        from rhino_jax.planner.variant_search import Solved, VariantCandidate

        plan_options, axes = self.plan_options, plan.mesh_axes
        target = plan_options.target_of(self.mesh)
        resolved = self._pins(plan_options, plan)
        written = plan_options.search_on(
            self.traced, self.mesh, target, [axes], *resolved
        ).asking(corrections=plan.corrections)
        if plan.has_tasks:
            from rhino_jax.planner.staging.fitted import solve_again

            return solve_again(as_requested(written), plan)
        done = [t for t in plan.transforms if t.choice]
        if plan.is_one_program:
            from rhino_jax.planner.staging.spmd_pipeline.whole import SolvedInOne

            return SolvedInOne.again(written, plan.num_stages, done)
        own = recipes = VariantCandidate(written, written.find())
        if done:
            search = written.after(done)
            own = VariantCandidate(search, search.find())
        return Solved(own, recipes if recipes.found.fits else own).alone()

    def _pins(
        self, plan_options: Any, plan: data.PlanData, program: Program | None = None
    ) -> tuple[ResolvedPins, Mapping[str, Any]]:
        """Resolve the pins of a request on the plan's mesh.

        Args:
          plan_options: the options that hold the pins.
          plan: gives the mesh and the number of stages.
          program: the program whose values are pinned; None: the user's own.
        Returns:
          The resolved pins with the specs of `basis` added, and the pins as expanded to
            paths.
        """
        pinned, _ = self._without_forms(plan_options)
        pinned, _ = without_stages(pinned, plan.num_stages)
        pins = resolve_pins(pinned, program or self.traced.program, plan.mesh_axes)
        if self.basis is not None:
            pins = replace(pins, inputs={**self.basis.specs, **pins.inputs})
        return pins, pinned

    def _replanned(
        self, plan: data.PlanData, plan_options: Any
    ) -> data.PlanData | None:
        """Plan with other pins or another budget, with the passes and the stage cuts of
        the plan; None where nothing fits.

        Also None where other cuts may be better (in stages, where the budget or stage
        pins differ), and where all processes must agree on a plan.
        """
        if plan_options.processes(plan.mesh, []):
            return None
        both = plan_options, self.plan_options
        if operator.ne(*(self._without_forms(w)[1] for w in both)):
            return None
        if plan.has_tasks:
            if len({w.memory_budget_bytes for w in both}) > 1:
                return None
            if operator.ne(*(self.stage_pins(w, plan) for w in both)):
                return None
        solved = self.solved_for(plan)
        before = solved.pinned_search
        pins, pinned = self._pins(plan_options, plan, before.running.program)
        request = plan_options.request_of(before.target, pins)
        with shown(plan_options.progress) as report:
            request = replace(request, corrections=plan.corrections, progress=report)
            found = solved.planned_with(replace(before, request=request, pinned=pinned))
        return found and self.finished(found[0], plan, plan_options, found[1])

    def stage_pins(self, plan_options: Any, plan: data.PlanData) -> dict[str, int]:
        """Return the pinned stages of a request: key → stage."""
        pinned, _ = self._without_forms(plan_options)
        return without_stages(pinned, plan.num_stages)[1]

    def _without_forms(self, plan_options: Any) -> tuple[dict[str, Any], Any]:
        """Return the pins of a request, and its pins of forms."""
        pinned = expand_pins(plan_options.pins, self.traced)
        return without_forms(pinned, sites_of(self.traced.forms, pinned))

    def finished(
        self, made: data.PlanData, plan: data.PlanData, plan_options: Any, solved: Any
    ) -> data.PlanData:
        """Return the `Plan` of a plan derived from the solved problem, with the notes
        and trees that the planner gives to every plan."""
        from rhino_jax.planner.cuts import with_storage_note

        notes = (*made.notes, *notes_of_microbatches(self.traced, made.transforms))
        program = self.traced.program
        notes = notes_of_arguments(program, made) + notes + notes_of_rules(program)
        made = with_storage_note(replace(made, notes=notes, recipes=plan.recipes))
        made = replace(made, model_flops=plan.model_flops)
        found = with_trees(made, self.traced, plan.mesh)
        origin = PlanOrigin(plan_options, self.traced, self.mesh, self.basis, solved)
        _keep(origin)
        return replace(found, origin=origin)


def with_origin(
    plan: data.PlanData,
    plan_options: Any,
    traced: Traced,
    mesh: Any,
    basis: ReusedSpecs | None,
) -> data.PlanData:
    """Attach an origin to a plan; a function that lives in an outer trace gets none,
    since its tracers must not outlive that trace.

    Args:
      plan: the plan; its `origin` is the solved problem, or None.
      plan_options, traced, mesh, basis: see `PlanOrigin`.
    """
    if traced.has_captured_tracers:
        return replace(plan, origin=None)
    origin = PlanOrigin(plan_options, traced, mesh, basis, plan.origin)
    _keep(origin)
    return replace(plan, origin=origin)


def _keep(origin: PlanOrigin) -> None:
    """Cache a solved problem, and evict the least recently used beyond `MAX_KEPT`."""
    if origin.solved is None:
        return
    if origin in _SOLVED:
        _SOLVED.remove(origin)
    _SOLVED.append(origin)
    while len(_SOLVED) > MAX_KEPT:
        _SOLVED.popleft().solved = None
