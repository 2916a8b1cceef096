"""Plans of programs that share state, on one mesh: the options of each, the search of
the mesh and the layout of the shared state, and agreement of processes on these.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rhino_jax.errors import InfeasiblePlanError, PinError
from rhino_jax.frontend.trace import Traced
from rhino_jax.hardware.target import Target
from rhino_jax.ir.program import Program
from rhino_jax.ir.spec import Spec, axes_text, format_spec, local_shape
from rhino_jax.plan.pin_trees import check_devices, expand_pins
from rhino_jax.plan.plan import PlanData
from rhino_jax.plan.resolved_pins import ResolvedPins, resolve_pins
from rhino_jax.plan.shared import (
    Plans,
    SharedLayout,
    Slot,
    shared_places,
    staying_inputs,
    taken_with,
)
from rhino_jax.planner.like import ReusedSpecs
from rhino_jax.planner.meshes import MeshAxes
from rhino_jax.planner.options import PlanOptions
from rhino_jax.runtime.meshes import axes_of_mesh, make_mesh
from rhino_jax.runtime.processes.agree import decided_by_first
from rhino_jax.units import format_bytes
from rhino_jax.utils.codec import from_json, to_json
from rhino_jax.utils.progress import shown


if TYPE_CHECKING:
    from rhino_jax.planner.meshes import MeshAxes
    from rhino_jax.planner.search.together import Member, SharedSolution


WHAT = "`rhino.plan_together`"

GOOD_ENOUGH = 1e-3
"""Share above the programs' own best steps from which other layouts are tried."""

MAX_AXES = 2
"""Maximum number of axes of candidate meshes; a third axis seldom gains."""


@dataclass(frozen=True, slots=True, eq=False)
class Together:
    """Programs that share state, with the options of each, and their plans.

    Attributes:
      traced: name → the traced function.
      weights: name → how often it runs, relative to the others.
      plan_options: name → the options of its plan.
      mesh: the mesh of all programs; None: rhino chooses.
      started: when planning began, in seconds of `time.monotonic`.
    """

    traced: Mapping[str, Traced]
    weights: Mapping[str, float]
    plan_options: Mapping[str, PlanOptions]
    mesh: Any
    started: float

    @property
    def names(self) -> list[str]:
        return list(self.traced)

    @property
    def programs(self) -> list[Program]:
        return [t.program for t in self.traced.values()]

    def meshes(self, target: Target) -> list[MeshAxes]:
        """Return the candidate meshes: those on which the pins of all programs hold."""
        if self.mesh is not None:
            return [axes_of_mesh(self.mesh)]
        every = []
        for name, traced in self.traced.items():
            pinned = self._pinned(name)
            every.append(self.plan_options[name].meshes_of(traced, target, pinned)[0])
        left = [axes for axes in every[0] if all(axes in others for others in every)]
        left = [axes for axes in left if len(axes) <= MAX_AXES] or left
        if not left:
            raise PinError(
                f"{WHAT}: no mesh suits the pins of all programs.",
                where="pins=",
                numbers="; ".join(
                    f"{name}: {', '.join(map(axes_text, meshes))}"
                    for name, meshes in zip(self.names, every, strict=True)
                ),
                fix="give mesh=, or use the same axes in all pins.",
            )
        return left

    def _pinned(self, name: str) -> Mapping[str, Any]:
        return expand_pins(self.plan_options[name].pins, self.traced[name])

    def members(
        self, target: Target, axes: MeshAxes, shared: list[list[Slot]]
    ) -> list[Member]:
        """Return each program with its search request and the pins of shared arrays."""
        from rhino_jax.planner.search.together import Member

        pins = [
            resolve_pins(self._pinned(name), program, axes)
            for name, program in zip(self.names, self.programs, strict=True)
        ]
        if self.mesh is not None:
            for name in self.names:
                check_devices(self._pinned(name), self.mesh)
        inputs = self._pins_of_all(pins, shared, axes)
        return [
            Member(
                program,
                self.plan_options[name].request_of(target, replace(p, inputs=mine)),
                self.weights[name],
                staying_inputs(program),
            )
            for name, program, p, mine in zip(
                self.names, self.programs, pins, inputs, strict=True
            )
        ]

    def _pins_of_all(
        self, pins: Sequence[ResolvedPins], shared: list[list[Slot]], axes: MeshAxes
    ) -> list[dict[int, Spec]]:
        """Extend a pin of a shared array to all programs.

        Raises:
          PinError: two programs pin it differently.
        """
        found = [dict(p.inputs) for p in pins]
        names = [name for name, _ in axes]
        for place in shared:
            said = [(m, slot) for m, slot in place if slot in pins[m].inputs]
            specs = {pins[m].inputs[slot] for m, slot in said}
            if len(specs) > 1:
                raise PinError(
                    f"{WHAT}: two programs pin a shared array differently.",
                    where=" and ".join(
                        f"{self.names[m]}: {self.path(m, s)}" for m, s in said
                    ),
                    numbers=" and ".join(
                        format_spec(pins[m].inputs[s], names) for m, s in said
                    ),
                    fix="drop one of the two.",
                )
            for spec in specs:
                for m, slot in place:
                    found[m][slot] = spec
        return found

    def path(self, member: int, slot: int) -> str:
        """Return the tree path of a program's input."""
        return self.programs[member].inputs[slot].path

    def plans(self) -> Plans[PlanData]:
        """Return a plan of each program, with one layout of the shared state."""
        plan_options = next(iter(self.plan_options.values()))
        target = plan_options.target_of(self.mesh)
        shared = shared_places(self.programs)
        layout = decided_layout(self, target, shared)
        axes = layout.mesh_axes
        members = self.members(target, axes, shared)
        mesh = self.mesh if self.mesh is not None else make_mesh(axes, WHAT)
        specs = dict(zip(self.names, layout.specs, strict=True))
        held = self._held_bytes(members, shared, layout.specs, mesh)
        found = self._planned(specs, held, mesh, shared)
        alone: dict[str, float | None] = dict.fromkeys(self.names)
        if plan_options.time_limit_s is None and plan_options.level == "best":
            found, held, alone = self._compared(found, held, mesh, shared, members)
        return Plans(
            plans=found,
            weights=self.weights,
            shared=tuple(
                tuple((self.names[m], self.path(m, slot)) for m, slot in place)
                for place in shared
            ),
            held_bytes=held,
            bound_s=min(layout.bound_s, self._sum_s(found)),
            alone_s=alone,
        )

    def _sum_s(self, plans: Mapping[str, PlanData]) -> float:
        return sum(self.weights[n] * p.predicted.step_time_s for n, p in plans.items())

    def _held_bytes(
        self,
        members: Sequence[Member],
        shared: list[list[Slot]],
        specs: Sequence[Mapping[int, Spec]],
        mesh: Any,
    ) -> dict[str, int]:
        """Return the bytes per device of the other programs' state that stay allocated
        while each program runs."""
        found = dict.fromkeys(self.names, 0)
        sizes = [size for _, size in axes_of_mesh(mesh)]
        for m, name in enumerate(self.names):
            for k, other in enumerate(members):
                left = other.stays - taken_with(shared, k, m) if k != m else ()
                for slot in left:
                    value = other.program.values[other.program.inputs[slot].value]
                    spec = specs[k].get(slot, ((),) * value.rank)
                    local = math.prod(local_shape(spec, value.shape, sizes))
                    whole = max(1, math.prod(value.shape))
                    found[name] += math.ceil(value.bytes * local / whole)
        return found

    def _planned(
        self,
        specs: Mapping[str, Mapping[int, Spec]],
        held: Mapping[str, int],
        mesh: Any,
        shared: list[list[Slot]],
        known: Mapping[str, PlanData] | None = None,
    ) -> dict[str, PlanData]:
        """Return a plan of each program, with the given layout of the shared state."""
        found = {}
        for m, (name, traced) in enumerate(self.traced.items()):
            if known is not None and name in known:
                found[name] = known[name]
                continue
            mine = {slot for place in shared for k, slot in place if k == m}
            others = ", ".join(n for n in self.names if n != name)
            kept = {slot: s for slot, s in specs[name].items() if slot in mine}
            basis = ReusedSpecs(f"together with {others}", mesh, kept, is_asked=False)
            try:
                found[name] = self._options_within(name, held).plan_with(
                    traced, mesh, basis
                )
            except InfeasiblePlanError as error:
                raise InfeasiblePlanError(
                    error.what,
                    where=f"{name}; {format_bytes(held[name])} of the other programs'"
                    f" state stays in memory; {error.where}",
                    numbers=error.numbers,
                    fix=error.fix,
                ) from None
        return found

    def _options_within(self, name: str, held: Mapping[str, int]) -> PlanOptions:
        plan_options = self.plan_options[name]
        budget = (
            plan_options.budget_bytes(plan_options.target_of(self.mesh)) - held[name]
        )
        limit = plan_options.time_limit_s
        return replace(
            plan_options,
            memory_budget_bytes=max(1, int(budget)),
            time_limit_s=limit and limit / (2 * len(self.names)),
        )

    def _compared(
        self,
        found: dict[str, PlanData],
        held: dict[str, int],
        mesh: Any,
        shared: list[list[Slot]],
        members: Sequence[Member],
    ) -> tuple[dict[str, PlanData], dict[str, int], dict[str, float | None]]:
        """Return the better of the joint layout and each program's own best layout."""
        alone: dict[str, PlanData] = {}
        for name, traced in self.traced.items():
            try:
                within = self._options_within(name, held)
                alone[name] = within.plan_with(traced, mesh, None)
            except InfeasiblePlanError:
                continue
        steps = {
            n: alone[n].predicted.step_time_s if n in alone else None for n in held
        }
        if len(alone) < len(found):
            return found, held, steps
        for name, plan in alone.items():
            if self._sum_s(found) <= (1 + GOOD_ENOUGH) * self._sum_s(alone):
                break
            other = self._like(name, plan, mesh, shared, members)
            if other is not None and self._sum_s(other[0]) < self._sum_s(found):
                found, held = other
        return found, held, steps

    def _like(
        self,
        name: str,
        plan: PlanData,
        mesh: Any,
        shared: list[list[Slot]],
        members: Sequence[Member],
    ) -> tuple[dict[str, PlanData], dict[str, int]] | None:
        """Return plans in which one program has the layout that it would have alone;
        None where nothing fits."""
        first = self.names.index(name)
        specs: list[dict[int, Spec]] = [{} for _ in self.names]
        for place in shared:
            own = [slot for m, slot in place if m == first]
            for m, slot in place:
                if own:
                    specs[m][slot] = plan.inputs[own[0]].spec
        nothing = dict.fromkeys(self.names, 0)
        by_name = dict(zip(self.names, specs, strict=True))
        try:
            found = self._planned(by_name, nothing, mesh, shared, {name: plan})
        except InfeasiblePlanError:
            return None
        every = [
            dict(enumerate(leaf.spec for leaf in found[n].inputs)) for n in self.names
        ]
        held = self._held_bytes(members, shared, every, mesh)
        budget = min(m.request.memory_budget_bytes for m in members)
        if any(p.predicted.peak_bytes + held[n] > budget for n, p in found.items()):
            return None
        return found, held


def decided_layout(
    programs: Together, target: Target, shared: list[list[Slot]]
) -> SharedLayout:
    """Return the mesh and the layout of the shared state: searched here, or received
    from the first of the processes that plan together.

    Args:
      programs: the programs to plan.
      target: the hardware.
      shared: for each shared array, its (program, input) slots.
    Raises:
      InfeasiblePlanError: no layout fits the memory budget.
      ProcessError: processes plan different programs, or one is lost.
    """
    first = next(iter(programs.plan_options.values()))

    def decide() -> Any:
        with shown(first.progress) as report:
            axes, found = _search(programs, target, shared, report)
        return to_json(SharedLayout(tuple(axes), found.specs, found.bound_s))

    asked = {
        "hardware": repr(target),
        "weights": repr(sorted(programs.weights.items())),
        "what is asked for": repr(
            [
                (name, w.memory_budget_bytes, w.level, w.time_limit_s, w.seed)
                for name, w in programs.plan_options.items()
            ]
        ),
    }
    return from_json(
        SharedLayout,
        decided_by_first(
            list(programs.traced.values()),
            first.processes(programs.mesh, programs.meshes(target)),
            asked,
            decide,
            WHAT,
        ),
    )


def _search(
    programs: Together,
    target: Target,
    shared: list[list[Slot]],
    report: Callable[[float | None, float | None], None],
) -> tuple[MeshAxes, SharedSolution]:
    """Return the best mesh, and the best layout on it."""
    # The solver takes a second to import, which loading a plan need not wait for.
    from rhino_jax.analysis.program_analysis import ProgramAnalysis
    from rhino_jax.planner.search.compare import COMPARED
    from rhino_jax.planner.search.driver import distinct_meshes
    from rhino_jax.planner.search.together import search_layout
    from rhino_jax.solver.incumbents import EFFORTS

    plan_options = next(iter(programs.plan_options.values()))
    analyses = [ProgramAnalysis.of(program, target) for program in programs.programs]
    meshes = programs.meshes(target)
    limit = plan_options.time_limit_s
    deadline = programs.started + (math.inf if limit is None else limit / 2)

    def layout(axes: MeshAxes, effort: Any, *, is_brief: bool) -> SharedSolution:
        members = programs.members(target, axes, shared)
        effort = replace(effort, deadline=deadline, seed=plan_options.seed)
        return search_layout(
            members, analyses, shared, axes, effort, report, is_brief=is_brief
        )

    if len(meshes) > 1:
        every = [
            (layout(tuple(axes), COMPARED, is_brief=True), i, tuple(axes))
            for i, axes in enumerate(distinct_meshes(meshes, target))
        ]
        meshes = [min((found.objective_s, i, axes) for found, i, axes in every)[2]]
    found = layout(meshes[0], EFFORTS[plan_options.level], is_brief=False)
    if not found.fits:
        members = programs.members(target, meshes[0], shared)
        raise _nothing_fits(programs, found, members, meshes[0])
    return meshes[0], found


def _nothing_fits(
    programs: Together,
    layout: SharedSolution,
    members: Sequence[Member],
    axes: MeshAxes,
) -> InfeasiblePlanError:
    request = min((m.request for m in members), key=lambda r: r.memory_budget_bytes)
    least = request.budget_for(layout.smallest_peak_bytes)
    return InfeasiblePlanError(
        f"{WHAT}: no layout of the shared state fits the memory budget.",
        where=f"programs {', '.join(programs.names)} on mesh ({axes_text(axes)});"
        f" {request.budget_text}",
        numbers=f"smallest peak found {format_bytes(layout.smallest_peak_bytes)}, with"
        " what the other programs need later",
        fix=f"raise memory_budget_bytes to {least} ({format_bytes(least)}); or plan"
        " fewer programs together, whose state need not stay.",
    )
