"""From a user's options to a plan: keywords checked, mesh and hardware resolved."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jax.sharding import Mesh

from rhino_jax.attention.sites import sites_of
from rhino_jax.cost.compute import model_flops
from rhino_jax.cost.corrections import NO_CORRECTIONS
from rhino_jax.errors import InfeasiblePlanError
from rhino_jax.frontend.trace import Traced
from rhino_jax.hardware.files import detect_target, load_target
from rhino_jax.hardware.target import Target
from rhino_jax.ir.spec import axes_text
from rhino_jax.passes.apply import apply_passes
from rhino_jax.pipeline.schedules.family import FAMILIES
from rhino_jax.pipeline.schedules.sequence_slices import read_schedule
from rhino_jax.plan import plan as data
from rhino_jax.plan.files.cache import (
    cache_key,
    cached_plan,
    kept,
    program_key,
    store_plan,
)
from rhino_jax.plan.fingerprint import fingerprint
from rhino_jax.plan.form_pins import without_forms
from rhino_jax.plan.lines import with_lines
from rhino_jax.plan.pin_trees import check_devices, check_pins, expand_pins
from rhino_jax.plan.resolved_pins import ResolvedPins, resolve_pins
from rhino_jax.plan.stages import IN_ONE_PROGRAM
from rhino_jax.plan.while_loops import read_while_trips, with_stated_trips
from rhino_jax.planner.decision import AS_WRITTEN, AUTO, DecisionOptions
from rhino_jax.planner.meshes import (
    MeshAxes,
    candidates,
    places_of,
    read_stages,
    where_pins_hold,
    without_stages,
)
from rhino_jax.planner.notes import (
    check_places,
    notes_of_arguments,
    notes_of_groups,
    notes_of_idle,
    notes_of_rules,
    read_places,
    warn_of_left_out,
    warn_of_uncovered,
)
from rhino_jax.planner.origin import (
    Like,
    ReusedSpecs,
    check_like,
    hardware_of_like,
    plan_of_like,
    with_origin,
)
from rhino_jax.runtime.meshes import axes_of_mesh, devices_here, make_mesh
from rhino_jax.runtime.processes.agree import is_alone, made_by_first, processes_of_mesh
from rhino_jax.runtime.sharded import with_trees
from rhino_jax.units import format_bytes
from rhino_jax.utils.keywords import (
    LARGEST_SEED,
    read_bytes,
    read_choice,
    read_count,
    read_count_or,
    read_folder,
    read_progress,
    read_seconds,
)


if TYPE_CHECKING:
    from rhino_jax.planner.search.records import Request
    from rhino_jax.planner.variant_search import Search


LEVELS = ("fast", "best")
SCHEDULES = (AUTO, *FAMILIES, IN_ONE_PROGRAM)


def _unnamed(read: Callable[[str, Any], Any]) -> Callable[[str, str, Any], Any]:
    return lambda what, _, value: read(what, value)


def _one_of(known: tuple[str, ...]) -> Callable[[str, str, Any], Any]:
    return partial(read_choice, known=known)


_AUTO_OR_NOT = _one_of((AUTO, AS_WRITTEN))

READ: Mapping[str, Callable[[str, str, Any], Any]] = {
    "memory_budget_bytes": read_bytes,
    "pins": _unnamed(check_pins),
    "level": _one_of(LEVELS),
    "time_limit_s": read_seconds,
    "seed": partial(read_count, most=LARGEST_SEED),
    "refine": partial(read_count_or, word=AUTO, least=0, most=1000),
    "progress": _unnamed(read_progress),
    "dump": read_folder,
    "recompute": _one_of((AUTO, AS_WRITTEN, "none")),
    **dict.fromkeys(
        ("loops", "grouped", "stacks", "attention", "offload"), _AUTO_OR_NOT
    ),
    "storage": _one_of((AS_WRITTEN, "blocks")),
    "microbatches": partial(read_count_or, word=AUTO),
    "stages": _unnamed(read_stages),
    "schedule": lambda what, _, value: read_schedule(what, value, SCHEDULES),
    "per_microbatch": _unnamed(read_places),
    "while_trips": _unnamed(read_while_trips),
}
"""Option → its reader: (public call, option, value) → parsed value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions(DecisionOptions):
    """The options of a plan, parsed; `rhino_jax.options.UserOptions` describes them.

    Numbers may be given as text with a unit; the fields hold the parsed numbers. `what`
    names the caller, for messages.
    """

    what: str
    hardware: str | Path | Target | None = None
    memory_budget_bytes: Any = None
    pins: Any = None
    level: str = "best"
    time_limit_s: Any = None
    seed: int = 0
    refine: int | str = 0
    progress: bool | Callable[[float | None, float | None], None] = True
    like: Like | None = None
    dump: Any = None
    while_trips: Any = None

    def __post_init__(self) -> None:
        check_like(self.like, self.what)
        for name, read in READ.items():
            value = read(self.what, name, getattr(self, name))
            object.__setattr__(self, name, value)

    def beside(self, said: PlanOptions, is_elsewhere: bool) -> PlanOptions:
        """Return these options, completed by others where these have the default.

        Args:
          said: the other options.
          is_elsewhere: this plan is for another mesh or hardware, which the other
            `like` would contradict.
        """
        names = {f.name for f in fields(self)} - {"what", "progress", "dump"}
        names -= {"like"} if is_elsewhere else set()
        default = PlanOptions(what=self.what)
        missing = [n for n in names if getattr(self, n) == getattr(default, n)]
        return replace(self, **{n: getattr(said, n) for n in missing})

    def plan(
        self, traced: Traced, mesh: Any | None, before: data.PlanData | None = None
    ) -> data.PlanData:
        """Plan a traced function, on this mesh or on the best that rhino finds.

        Args:
          traced: the traced function.
          mesh: the mesh; None: rhino chooses.
          before: the function's last plan, for another signature; its mesh and its
            arguments' shardings are taken over where that fits.
        """
        program = with_stated_trips(self.what, traced.program, self.while_trips)
        if program is not traced.program:
            traced = replace(traced, program=program, after_passes={})
        warn_of_uncovered(traced.program)
        check_places(self.what, self.per_microbatch, traced.program)
        like = plan_of_like(self.like, self.what)
        if (base := like or before) is None:
            return self.plan_with(traced, mesh, None)
        basis = ReusedSpecs.of(base, traced, mesh, self.what, is_asked=like is not None)
        basis = basis.and_of(before, traced.program)
        try:
            return self.plan_with(traced, basis.mesh, basis)
        except InfeasiblePlanError as error:
            refused = error
        if not basis.is_asked:
            return self.plan_with(traced, mesh, None)
        # Where nothing fits without them either, that is the error.
        free = self.plan_with(traced, basis.mesh, None)
        held = sum(leaf.bytes_per_device for leaf in free.inputs)
        raise InfeasiblePlanError(
            refused.what,
            where=f"{basis.source}, which fixes {len(basis.specs)} argument arrays on"
            f" mesh ({axes_text(axes_of_mesh(basis.mesh))}); {refused.where}",
            numbers=f"{refused.numbers}; without like= the peak is"
            f" {format_bytes(free.predicted.peak_bytes)}, arguments"
            f" {format_bytes(held)} of it",
            fix="plan without like=, or plan both as one: rhino.plan_together; or"
            f" {refused.fix}",
        )

    def plan_with(
        self,
        traced: Traced,
        mesh: Any | None,
        basis: ReusedSpecs | None,
        before: tuple[int, ...] = (),
    ) -> data.PlanData:
        """Plan a traced function on a mesh, with the specs of another plan.

        Args:
          traced: the traced function.
          mesh: the mesh; None: rhino chooses.
          basis: the specs that another plan fixes; None: none.
          before: number of places of each stage of a plan on this mesh; empty: none.
        """
        given = mesh
        found, basis = self.found_with(traced, mesh, basis, before)
        if mesh is None:
            mesh = make_mesh(found.mesh_axes, self.what)
        if basis is not None:
            found = basis.reported_in(found, traced.program)
        made = with_trees(found, traced, mesh)
        return with_origin(made, self, traced, given, basis)

    def found_with(
        self,
        traced: Traced,
        mesh: Any | None,
        basis: ReusedSpecs | None,
        before: tuple[int, ...] = (),
    ) -> tuple[data.PlanData, ReusedSpecs | None]:
        """Return the plan without trees and mesh, and the specs taken over in it."""
        target = self.target_of(mesh)
        every = expand_pins(self.pins, traced)
        pinned, form_pins = without_forms(every, sites_of(traced.forms, every))
        axes = None if mesh is None else axes_of_mesh(mesh)
        places = before if basis is None else basis.places
        if not places or self.stages != AUTO:
            on_torus = any(tier.topology == "torus" for tier in target.tiers)
            count = self.count_of(target)
            if axes is not None:
                count = math.prod(size for _, size in axes)
            places = places_of(self.stages, axes, count, on_torus=on_torus)
        pinned, stage_pins = without_stages(pinned, len(places))
        if axes is not None:
            meshes, pins = [axes], resolve_pins(pinned, traced.program, axes)
            check_devices(pinned, mesh)
            if basis is not None:
                # The user's pins come first.
                left = {i: s for i, s in basis.specs.items() if i not in pins.inputs}
                basis = replace(basis, specs=left)
                pins = replace(pins, inputs={**basis.specs, **pins.inputs})
        else:
            meshes, pins = self.meshes_of(traced, target, pinned, places)
        # Existing state keeps its storage.
        storage = self.storage if basis is None else basis.stored
        program = traced.program
        requested = self._asked(mesh, meshes, target, pins)
        stages = {} if basis is None or self.stages != AUTO else basis.stages
        asked = (*requested, repr(storage), stage_pins, places, stages)
        if traced.forms is not None and (traced.forms.sites or form_pins):
            asked = (*asked, traced.forms.key, sorted(form_pins.items()))

        def is_of_program(plan: data.PlanData) -> bool:
            return plan.fingerprint == fingerprint(program, plan.mesh_axes)

        def make() -> data.PlanData:
            def searched() -> data.PlanData:
                # The solver takes a second to import; loading a plan does not need it.
                from rhino_jax.planner.searched import search_for

                search = self.search_on(traced, mesh, target, meshes, pins, pinned)
                search = replace(
                    search.asking(corrections=learnt),
                    refine=self.refine,
                    storage=storage,
                    stage_pins=stage_pins,
                    form_pins=form_pins,
                    kept=stages,
                )
                found = search_for(search, places, self)
                if self.refine == AUTO and found.refined:
                    store_plan(learnt_at, found)
                return found

            of_program = program_key(program, target)
            # The corrections of costs that compiled programs gave are kept with the
            # plan that refine="auto" made last, under the program, the target and the
            # versions of all that makes and compiles plans; lines are as they are now.
            learnt_at, learnt = cache_key(of_program, ("corrections",)), NO_CORRECTIONS
            last = cached_plan(learnt_at)
            if last is not None and is_of_program(last):
                lines = apply_passes(traced, last.transforms).program
                learnt = with_lines(last, lines).corrections
            # A plan that was refined has corrections of its own.
            known = (
                (*asked, learnt) if learnt.programs and self.refine != AUTO else asked
            )

            if self.dump is not None:
                return searched()  # A cached plan has no passes to dump.
            return kept(
                cache_key(of_program, known),
                searched,
                belongs=is_of_program,
                # A less busy machine would find another plan.
                is_worth_keeping=lambda p: not data.is_cut_by_clock(p),
            )

        found = made_by_first(
            traced,
            self.processes(mesh, meshes),
            {"hardware": repr(target), "what is asked for": repr(asked)},
            make,
            self.what,
        )
        warn_of_left_out(program, found)
        notes = *notes_of_arguments(program, found), *found.notes
        notes += notes_of_rules(program) + notes_of_groups(program, target)
        if self.hardware is None and isinstance(mesh, Mesh):
            notes += notes_of_idle(mesh)
        flops = model_flops(program, target)
        return replace(found, notes=notes, model_flops=flops), basis

    def processes(self, mesh: Any | None, meshes: list[MeshAxes]) -> tuple[int, ...]:
        """Return the processes that must share the plan; empty: only this one."""
        if is_alone():
            return ()
        if mesh is None:  # All candidate meshes have the same number of devices.
            mesh = make_mesh(meshes[0], self.what)
        return processes_of_mesh(mesh)

    def _asked(
        self,
        mesh: Any | None,
        meshes: list[MeshAxes],
        target: Target,
        pins: ResolvedPins,
    ) -> tuple[object, ...]:
        """Return everything else that a plan depends on, next to program and target."""
        asked: tuple[object, ...] = (
            meshes,
            sorted(pins.inputs.items()),
            sorted(pins.outputs.items()),
            # A `rhino.pin` is part of the program, wherever its line is.
            sorted(
                (v, p.spec, "" if p.is_in_program else p.key)
                for v, p in pins.values.items()
            ),
            self.budget_bytes(target),
            self.level,
            self.time_limit_s,
            self.seed,
            *(getattr(self, f.name) for f in fields(DecisionOptions)),
        )
        if not self.refine:
            return asked
        # Plans are compiled for the mesh itself where its devices are present.
        devices = list(mesh.devices.flat) if isinstance(mesh, Mesh) else []
        return (*asked, self.refine, sorted({str(d.device_kind) for d in devices}))

    def target_of(self, mesh: Any | None) -> Target:
        """Return the hardware: as requested, or of the mesh, or of this process; with
        the kernels that the user leaves to the planner."""
        hardware = self.hardware
        if hardware is None:
            hardware = hardware_of_like(self.like)
        if hardware is not None:
            found = load_target(hardware)
        elif isinstance(mesh, Mesh):
            found = detect_target(list(mesh.devices.flat))
        else:
            found = detect_target(devices_here(self.what))
        if self.grouped == AUTO:
            return found
        return replace(found, device=replace(found.device, tiles_groups=False))

    def search_on(
        self,
        traced: Traced,
        mesh: Any | None,
        target: Target,
        meshes: list[MeshAxes],
        pins: ResolvedPins,
        pinned: Mapping[str, Any],
    ) -> Search:
        """Return the search of a traced function, which reports no progress.

        Args:
          traced, mesh: see `plan`.
          target: the hardware.
          meshes: the candidate meshes.
          pins: the pins, resolved on the last of these.
          pinned: the user's pins.
        """
        from rhino_jax.planner.variant_search import Search

        request = self.request_of(target, pins)
        return Search(
            traced, mesh, meshes, target, request, pinned, 0, self.what, options=self
        )

    def request_of(self, target: Target, pins: ResolvedPins) -> Request:
        """Return the request of a search, its memory budget without the reserve."""
        from rhino_jax.planner.search.records import Request

        reserve = target.device.reserve_share
        return Request(
            memory_budget_bytes=(1 - reserve) * self.budget_bytes(target),
            reserve_share=reserve,
            pins=pins.inputs,
            output_pins=pins.outputs,
            value_pins=pins.values,
            level=self.level,
            time_limit_s=self.time_limit_s,
            deadline=time.monotonic() + (self.time_limit_s or math.inf),
            seed=self.seed,
        )

    def count_of(self, target: Target) -> int:
        """Return the number of devices, where no mesh gives it."""
        return target.num_devices or len(devices_here(self.what))

    def budget_bytes(self, target: Target) -> float:
        """Return the memory budget in bytes per device, including the reserve."""
        budget = self.memory_budget_bytes
        return target.device.hbm_bytes if budget is None else budget

    def meshes_of(
        self,
        traced: Traced,
        target: Target,
        pinned: Mapping[str, Any],
        places: tuple[int, ...] = (1,),
    ) -> tuple[list[MeshAxes], ResolvedPins]:
        """Return the meshes on which all pins hold, and the pins on the last."""
        every = candidates(traced, target, self.count_of(target), places)
        return where_pins_hold(every, pinned, traced.program)
