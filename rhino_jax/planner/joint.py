"""Plans of programs that share state, on one mesh: the options of each, the search of
the mesh and the layout of the shared state, and agreement of processes on these.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from rhino_jax.errors import InfeasiblePlanError, PinError
from rhino_jax.frontend.trace import Traced
from rhino_jax.hardware.target import Target
from rhino_jax.ir.program import Program
from rhino_jax.ir.spec import Spec, axes_text, format_spec, local_shape
from rhino_jax.plan.pin_trees import check_devices, expand_pins
from rhino_jax.plan.plan import PlanData
from rhino_jax.plan.resolved_pins import resolve_pins
from rhino_jax.plan.shared import (
    Plans,
    SharedLayout,
    Slot,
    shared_places,
    staying_inputs,
    taken_with,
)
from rhino_jax.planner.decision import Decision, NotFaster, step_s_of
from rhino_jax.planner.meshes import MeshAxes
from rhino_jax.planner.options import PlanOptions
from rhino_jax.planner.origin import ReusedSpecs
from rhino_jax.runtime.meshes import axes_of_mesh, make_mesh
from rhino_jax.runtime.processes.agree import decided_by_first
from rhino_jax.units import format_bytes
from rhino_jax.utils.codec import from_json, to_json
from rhino_jax.utils.progress import shown


if TYPE_CHECKING:
    from rhino_jax.planner.search.together import Member, SharedSolution
import time

from rhino_jax._compat import context_mesh
from rhino_jax.errors import RhinoError, nearest
from rhino_jax.frontend.call import split_call
from rhino_jax.frontend.parameters import read_parameters
from rhino_jax.frontend.trace import trace_call
from rhino_jax.runtime.constraints import auto_mesh
from rhino_jax.runtime.meshes import read_mesh
from rhino_jax.runtime.processes.agree import attending
from rhino_jax.runtime.sharded import ShardedFunction


WHAT = "`rhino.plan_together`"

GOOD_ENOUGH = 1e-3
"""Share above the programs' own best steps from which other layouts are tried."""

MAX_AXES = 2
"""Maximum number of axes of candidate meshes; a third axis seldom gains."""


PlansAndBytes = tuple[dict[str, PlanData], dict[str, int]]
"""The plan of each program, and the bytes per device of the other programs' state that
stay allocated while it runs."""


@dataclass(frozen=True, eq=False)
class Together:
    """Programs that share state, with the options of each, and their plans.

    Attributes:
      traced: name → the traced function.
      weights: name → how often it runs, relative to the others.
      plan_options: name → the options of its plan.
      mesh: the mesh of all programs; None: rhino chooses.
      started: when planning began, in seconds of `time.monotonic`.
      limit_bytes: maximum predicted peak of a device.
    """

    traced: Mapping[str, Traced]
    weights: Mapping[str, float]
    plan_options: Mapping[str, PlanOptions]
    mesh: Any
    started: float
    limit_bytes: float = math.inf

    @property
    def names(self) -> list[str]:
        return list(self.traced)

    @property
    def programs(self) -> list[Program]:
        return [t.program for t in self.traced.values()]

    @cached_property
    def shared(self) -> list[list[Slot]]:
        """For each shared array, its (program, input) slots."""
        return shared_places(self.programs)

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

    def members(self, target: Target, axes: MeshAxes) -> list[Member]:
        """Return each program with its search request and the pins of shared arrays.

        Raises:
          PinError: two programs pin a shared array differently.
        """
        from rhino_jax.planner.search.together import Member

        pins = [
            resolve_pins(self._pinned(name), program, axes)
            for name, program in zip(self.names, self.programs, strict=True)
        ]
        if self.mesh is not None:
            for name in self.names:
                check_devices(self._pinned(name), self.mesh)
        # A pin of a shared array holds in all programs.
        inputs = [dict(p.inputs) for p in pins]
        for place in self.shared:
            said = [(m, slot) for m, slot in place if slot in pins[m].inputs]
            specs = {pins[m].inputs[slot] for m, slot in said}
            if len(specs) > 1:
                names = [name for name, _ in axes]
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
                    inputs[m][slot] = spec
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

    def path(self, member: int, slot: int) -> str:
        """Return the tree path of a program's input."""
        return self.programs[member].inputs[slot].path

    def plans(self) -> Plans[PlanData]:
        """Return a plan of each program, with one layout of the shared state."""
        plan_options = next(iter(self.plan_options.values()))
        target = plan_options.target_of(self.mesh)
        layout = decided_layout(self, target)
        axes = layout.mesh_axes
        mesh = self.mesh if self.mesh is not None else make_mesh(axes, WHAT)
        members = self.members(target, axes)
        limit = min(m.request.memory_budget_bytes for m in members)
        here = replace(self, mesh=mesh, limit_bytes=limit)
        found, held = first = here.planned(layout.specs)
        alone: dict[str, float | None] = dict.fromkeys(self.names)
        if plan_options.time_limit_s is None and plan_options.level == "best":
            (found, held), alone = here.compared(first)
        return Plans(
            plans=found,
            weights=self.weights,
            shared=tuple(
                tuple((self.names[m], self.path(m, slot)) for m, slot in place)
                for place in self.shared
            ),
            held_bytes=held,
            bound_s=min(layout.bound_s, self.sum_s(found)),
            alone_s=alone,
        )

    def sum_s(self, plans: Mapping[str, PlanData]) -> float:
        """Return the weighted sum of the steps of plans in seconds."""
        return sum(self.weights[n] * p.predicted.step_time_s for n, p in plans.items())

    def options_within(self, name: str, held: Mapping[str, int]) -> PlanOptions:
        """Return the options of a program's plan, where other programs hold bytes."""
        plan_options = self.plan_options[name]
        budget = plan_options.budget_bytes(plan_options.target_of(self.mesh))
        limit = plan_options.time_limit_s
        return replace(
            plan_options,
            memory_budget_bytes=max(1, int(budget - held[name])),
            time_limit_s=limit and limit / (2 * len(self.names)),
        )

    def planned(self, specs: Sequence[Mapping[int, Spec]]) -> PlansAndBytes:
        """Return the plans with a layout of the shared state.

        Args:
          specs: for each program, input → spec.
        Raises:
          InfeasiblePlanError: a program does not fit; says which.
        """
        held = self._held_bytes(specs)
        return self._with(specs, held, {}), held

    def _held_bytes(self, specs: Sequence[Mapping[int, Spec]]) -> dict[str, int]:
        found = dict.fromkeys(self.names, 0)
        sizes = [size for _, size in axes_of_mesh(self.mesh)]
        for m, name in enumerate(found):
            for k, other in enumerate(self.programs):
                taken = taken_with(self.shared, k, m)
                for slot in staying_inputs(other) - taken if k != m else ():
                    value = other.values[other.inputs[slot].value]
                    spec = specs[k].get(slot, ((),) * value.rank)
                    local = math.prod(local_shape(spec, value.shape, sizes))
                    whole = max(1, math.prod(value.shape))
                    found[name] += math.ceil(value.bytes * local / whole)
        return found

    def _with(
        self,
        specs: Sequence[Mapping[int, Spec]],
        held: Mapping[str, int],
        known: Mapping[str, PlanData],
    ) -> dict[str, PlanData]:
        """Return a plan of each program, those that are known already as they are."""
        found = dict(known)
        for m, (name, traced) in enumerate(self.traced.items()):
            if name in known:
                continue
            mine = {slot for place in self.shared for k, slot in place if k == m}
            others = ", ".join(n for n in self.names if n != name)
            kept = {slot: s for slot, s in specs[m].items() if slot in mine}
            source = f"together with {others}"
            basis = ReusedSpecs(source, self.mesh, kept, is_asked=False)
            within = self.options_within(name, held)
            try:
                found[name] = within.plan_with(traced, self.mesh, basis)
            except InfeasiblePlanError as error:
                raise InfeasiblePlanError(
                    error.what,
                    where=f"{name}; {format_bytes(held[name])} of the other programs'"
                    f" state stays in memory; {error.where}",
                    numbers=error.numbers,
                    fix=error.fix,
                ) from None
        return {name: found[name] for name in self.names}

    def compared(
        self, joint: PlansAndBytes
    ) -> tuple[PlansAndBytes, dict[str, float | None]]:
        """Return the plans with the best of some layouts: the given one, and that which
        each program would have alone; and the step of each program alone in seconds."""
        found, held = joint
        alone: dict[str, PlanData] = {}
        for name, traced in self.traced.items():
            with suppress(InfeasiblePlanError):
                within = self.options_within(name, held)
                alone[name] = within.plan_with(traced, self.mesh, None)
        steps = {n: step_s_of(alone[n]) if n in alone else None for n in found}
        tried: Decision[str, PlansAndBytes] = Decision(
            lambda name: self._like(name, alone[name]) if name else joint,
            (InfeasiblePlanError,),
            lambda one: (self.sum_s(one[0]),),
            min_gain=0.0,
        )
        best_s = tried.seconds("")
        for name in alone if len(alone) == len(found) else ():
            if best_s <= (1 + GOOD_ENOUGH) * self.sum_s(alone):
                break
            best_s = min(best_s, tried.seconds(name))
        return tried.taken(), steps

    def _like(self, name: str, plan: PlanData) -> PlansAndBytes:
        """Return plans in which one program has the layout that it would have alone.

        Raises:
          InfeasiblePlanError, NotFaster: not all fit.
        """
        names = self.names
        specs: list[dict[int, Spec]] = [{} for _ in names]
        for place in self.shared:
            own = [slot for m, slot in place if m == names.index(name)]
            for m, slot in place:
                if own:
                    specs[m][slot] = plan.inputs[own[0]].spec
        found = self._with(specs, dict.fromkeys(names, 0), {name: plan})
        held = self._held_bytes(
            [dict(enumerate(leaf.spec for leaf in found[n].inputs)) for n in names]
        )
        limit = self.limit_bytes
        if any(p.predicted.peak_bytes + held[n] > limit for n, p in found.items()):
            raise NotFaster(math.inf)
        return found, held


def decided_layout(programs: Together, target: Target) -> SharedLayout:
    """Return the mesh and the layout of the shared state: searched here, or received
    from the first of the processes that plan together.

    Args:
      programs: the programs to plan.
      target: the hardware.
    Raises:
      InfeasiblePlanError: no layout fits the memory budget.
      ProcessError: processes plan different programs, or one is lost.
    """
    first = next(iter(programs.plan_options.values()))

    def decide() -> Any:
        # The solver takes a second to import, which loading a plan need not wait for.
        from rhino_jax.analysis.program_analysis import ProgramAnalysis
        from rhino_jax.planner.search.compare import COMPARED
        from rhino_jax.planner.search.driver import distinct_meshes
        from rhino_jax.planner.search.together import search_layout
        from rhino_jax.solver.incumbents import EFFORTS

        analyses = [ProgramAnalysis.of(each, target) for each in programs.programs]
        meshes = programs.meshes(target)
        limit = first.time_limit_s
        deadline = programs.started + (math.inf if limit is None else limit / 2)

        def layout(axes: MeshAxes, effort: Any, *, is_brief: bool) -> SharedSolution:
            return search_layout(
                programs.members(target, axes),
                analyses,
                programs.shared,
                axes,
                replace(effort, deadline=deadline, seed=first.seed),
                report,
                is_brief=is_brief,
            )

        with shown(first.progress) as report:
            if len(meshes) > 1:
                every = [
                    (layout(tuple(axes), COMPARED, is_brief=True).objective_s, i, axes)
                    for i, axes in enumerate(distinct_meshes(meshes, target))
                ]
                meshes = [tuple(min(every)[2])]
            found = layout(meshes[0], EFFORTS[first.level], is_brief=False)
        if found.fits:
            return to_json(SharedLayout(meshes[0], found.specs, found.bound_s))
        members = programs.members(target, meshes[0])
        request = min((m.request for m in members), key=lambda r: r.memory_budget_bytes)
        least = request.budget_for(found.smallest_peak_bytes)
        raise InfeasiblePlanError(
            f"{WHAT}: no layout of the shared state fits the memory budget.",
            where=f"programs {', '.join(programs.names)} on mesh"
            f" ({axes_text(meshes[0])}); {request.budget_text}",
            numbers="smallest peak found"
            f" {format_bytes(found.smallest_peak_bytes)}, with what the other programs"
            " need later",
            fix=f"raise memory_budget_bytes to {least} ({format_bytes(least)}); or plan"
            " fewer programs together, whose state need not stay.",
        )

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


def planned_together(
    programs: Mapping[str, Sequence[Any]],
    *,
    weights: Mapping[str, float] | None,
    mesh: Any,
    pins: Mapping[str, Any] | None,
    **options: Any,
) -> Plans[PlanData]:
    """Plan programs that share state as one problem; see `rhino_jax.plan_together`.

    Args:
      programs, weights, mesh, pins: as the user gave them.
      options: `PlanOptions` of every program.
    """
    started = time.monotonic()
    given = read_mesh(mesh if mesh is not None else context_mesh(), WHAT)
    pins = _by_name("pins", pins, programs)
    shares = {**dict.fromkeys(programs, 1.0), **_by_name("weights", weights, programs)}
    for name, weight in shares.items():
        is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not is_number or not 0 < weight < math.inf:
            raise RhinoError(
                f"{WHAT}: a weight must be a positive number.",
                where=f"weights[{name!r}]",
                numbers=f"got {weight!r}",
                fix="state how often the program runs relative to the others, as 10 or"
                " 0.1.",
            )
    plan_options = {
        name: PlanOptions(pins=pins.get(name), what=WHAT, **options)
        for name in programs
    }
    twin = None if given is None else auto_mesh(given)
    traced: dict[str, Traced] = {}
    with attending(given):
        for name, entry in programs.items():
            fn, args, kwargs = _call_of(name, entry)
            is_sharded = isinstance(fn, ShardedFunction)
            parameters = fn.parameters if is_sharded else read_parameters(fn, what=WHAT)
            call = split_call(parameters, tuple(args), kwargs, WHAT)
            traced[name] = trace_call(parameters, call, mesh=twin, what=WHAT)
        weighted = {name: float(weight) for name, weight in shares.items()}
        return Together(traced, weighted, plan_options, given, started).plans()


def _by_name(
    keyword: str, given: Mapping[str, Any] | None, programs: Mapping[str, Any]
) -> dict[str, Any]:
    """Check a keyword that maps program names to values.

    Raises:
      RhinoError: it is no mapping, or it names an unknown program.
    """
    if not isinstance(programs, Mapping) or not programs:
        raise RhinoError(
            f"{WHAT}: give a mapping of names to programs.",
            where="the first argument",
            numbers=f"got {type(programs).__name__}",
            fix='write {"train": (train_step, args), "eval": (evaluate, args)}.',
        )
    if given is None:
        return {}
    names = given if isinstance(given, Mapping) else [type(given).__name__]
    for name in names:
        if name not in programs:
            raise RhinoError(
                f"{WHAT}: {keyword}= names no program: {name!r}."
                + nearest(str(name), map(str, programs)),
                where=f"{keyword}=",
                numbers=f"programs: {', '.join(map(str, programs))}",
                fix=f"write {keyword}={{{next(iter(programs))!r}: …}}.",
            )
    return dict(given)


def _call_of(name: str, entry: Any) -> tuple[Any, Any, Any]:
    """Return the function of a program, its arguments and keyword arguments."""
    is_entry = isinstance(entry, tuple | list) and len(entry) in (2, 3)
    if is_entry and callable(entry[0]) and isinstance(entry[1], tuple | list):
        return (*entry, {})[:3]
    raise RhinoError(
        f"{WHAT}: a program is (function, args) or (function, args, kwargs).",
        where=f"programs[{name!r}]",
        numbers=f"got {type(entry).__name__}",
        fix=f'write {{"{name}": (fn, (params, batch))}}; args is a tuple.',
    )
