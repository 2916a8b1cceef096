"""From checked options to a plan: on one mesh, or in pipeline stages."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rhino_jax.cost.corrections import CostCorrections
from rhino_jax.errors import InfeasiblePlanError, PinError, StageError
from rhino_jax.frontend.trace import Traced
from rhino_jax.hardware.target import Target
from rhino_jax.ir.transform import Stored
from rhino_jax.plan.kept import Part
from rhino_jax.plan.plan import PlanData
from rhino_jax.plan.resolved_pins import ResolvedPins
from rhino_jax.plan.stages import IN_ONE_PROGRAM, STAGE_AXIS
from rhino_jax.planner.corrected import MAX_COMPILED, corrected_plan
from rhino_jax.planner.cuts import as_requested, best_cut
from rhino_jax.planner.meshes import AUTO, MeshAxes, check_in_stages
from rhino_jax.planner.search.passes import Dump
from rhino_jax.planner.staging.auto import with_stages
from rhino_jax.planner.staging.plan import NOWHERE, plan_stages
from rhino_jax.planner.staging.spmd_pipeline.compared import or_in_one_program
from rhino_jax.planner.staging.spmd_pipeline.planned import (
    EVERY,
    StageBaseline as InOne,
    plan_in_one_program,
)
from rhino_jax.planner.variant_search import Search
from rhino_jax.utils.progress import shown


if TYPE_CHECKING:
    from rhino_jax.planner.options import PlanOptions


@dataclass(frozen=True, slots=True, eq=False)
class SearchRequest:
    """A function to plan, whatever the mesh.

    Attributes:
      traced: the traced function.
      mesh: the mesh that the user gave; None: the best that is found.
      target: the hardware.
      pinned: the user's pins.
      storage: how fused weights are stored.
      stage_pins: key → stage.
      kept: input → stages that hold it in another plan, whose stage cuts are taken
        over.
      corrections: corrections of costs by programs that were compiled before.
    """

    traced: Traced
    mesh: Any
    target: Target
    pinned: Mapping[str, Any]
    storage: str | Stored
    stage_pins: Mapping[str, int]
    kept: Mapping[int, Part]
    corrections: CostCorrections


def search_for(
    plan_options: PlanOptions,
    asked: SearchRequest,
    meshes: list[MeshAxes],
    pins: ResolvedPins,
    places: tuple[int, ...],
) -> PlanData:
    """Search, and report the time of the whole comparison; see `_search_for`."""
    started = time.monotonic()
    plan = _search_for(plan_options, asked, meshes, pins, places)
    report = replace(plan.search, seconds=time.monotonic() - started)
    is_own = plan_options.refine == AUTO and plan.refined
    if asked.corrections.programs and not is_own:
        note = (
            f"costs are corrected by {asked.corrections}, from earlier plans of this"
            " program with refine='auto'."
        )
        notes = (*plan.notes, note)
        plan = replace(plan, corrections=asked.corrections, notes=notes)
    return replace(plan, search=report)


def _search_for(
    plan_options: PlanOptions,
    asked: SearchRequest,
    meshes: list[MeshAxes],
    pins: ResolvedPins,
    places: tuple[int, ...],
) -> PlanData:
    """Search on one mesh, in pipeline stages, or both.

    Args:
      plan_options: the user's options.
      asked: the function to plan.
      meshes: the candidate meshes.
      pins: the pins, resolved on the last of these.
      places: number of places of each stage along the stage axis; a single stage where
        the user gave no number: then more stages are compared where they may be faster.
    Raises:
      InfeasiblePlanError, MicrobatchError, StageError, ScheduleError.
    """
    target = asked.target
    request = plan_options.request_of(target, pins)
    request = replace(request, corrections=asked.corrections)
    if plan_options.dump is not None:
        watch = Dump.of_traced(plan_options.dump, asked.traced, plan_options.what)
        request = replace(request, watch=watch)
    with shown(plan_options.progress) as report:
        search = Search(
            asked.traced,
            asked.mesh,
            meshes,
            target,
            request,
            asked.pinned,
            MAX_COMPILED if plan_options.refine == AUTO else int(plan_options.refine),
            plan_options.what,
            report,
        )
        if len(places) > 1:
            check_in_stages(asked.storage, len(places))
            return _with_earlier_stages(plan_options, search, places, asked)
        if plan_options.schedule == IN_ONE_PROGRAM:
            raise StageError(
                f"{plan_options.what}: schedule={IN_ONE_PROGRAM!r} is of several"
                " stages, and nobody said how many.",
                where="`schedule=` and `stages=`",
                numbers="one stage",
                fix=f"give stages=2, say, or a mesh with an axis `{STAGE_AXIS}`.",
            )
        if not _may_have_stages(plan_options, asked):
            return _noted(
                plan_options, _on_one_mesh(plan_options, search, asked.storage)
            )
        on_one: PlanData | InfeasiblePlanError
        try:
            on_one = _on_one_mesh(plan_options, search, asked.storage)
        except InfeasiblePlanError as error:
            if (error.divided_peak_bytes or 0) > request.memory_budget_bytes:
                raise  # Stages cannot lower the evenly divided peak.
            on_one = error

        def plan_in(groups: tuple[int, ...], enough_s: float) -> PlanData:
            own, on_own = plan_options.meshes_of(
                asked.traced, target, asked.pinned, groups
            )
            request = plan_options.request_of(target, on_own)
            # All searches share the time limit that the user gave.
            first = search.request
            request = replace(
                request,
                watch=first.watch,
                deadline=first.deadline,
                corrections=first.corrections,
            )
            more = replace(search, meshes=own, request=request)
            return _in_stages(plan_options, more, groups, {}, enough_s=enough_s)

        count = plan_options.count_of(target)
        program = asked.traced.program
        return _noted(
            plan_options, with_stages(on_one, program, target, count, plan_in)
        )


def with_own_variant(plan: PlanData) -> PlanData:
    """Give the chosen variant the plan's own step time and peak; it was compared by
    those of a brief search."""
    cost = plan.predicted
    variants = tuple(
        replace(v, step_time_s=cost.step_time_s, peak_bytes=cost.peak_bytes)
        if v.is_chosen
        else v
        for v in plan.variants
    )
    return replace(plan, variants=variants)


def _noted(plan_options: PlanOptions, plan: PlanData) -> PlanData:
    """Add a note on a requested schedule that has no effect on a plan of one stage."""
    if plan_options.schedule == AUTO or plan.num_stages > 1:
        return plan
    said = f"schedule={plan_options.schedule!r} has no effect: the plan has one stage."
    return replace(plan, notes=(*plan.notes, said))


def _may_have_stages(plan_options: PlanOptions, asked: SearchRequest) -> bool:
    """Whether the planner may choose the number of stages."""
    return (
        plan_options.stages == AUTO
        and asked.mesh is None
        and asked.storage == "as written"
        and plan_options.microbatches != 1
        and not plan_options.refine
    )


def _on_one_mesh(
    plan_options: PlanOptions, search: Search, storage: str | Stored
) -> PlanData:
    asked = {
        "microbatches": plan_options.microbatches,
        "recompute": plan_options.recompute,
        "loops": plan_options.loops,
    }

    def plan_by(search: Search) -> PlanData:
        return best_cut(search, asked, storage, plan_options.per_microbatch)

    if plan_options.refine == AUTO:
        return corrected_plan(search, plan_by)
    return plan_by(search)


def _with_earlier_stages(
    plan_options: PlanOptions,
    search: Search,
    places: tuple[int, ...],
    asked: SearchRequest,
) -> PlanData:
    """Plan stages with another plan's cuts, where the program may still be cut so."""
    pins = asked.stage_pins
    if asked.kept:
        try:
            return _in_stages(plan_options, search, places, pins, asked.kept)
        except (StageError, PinError, InfeasiblePlanError) as error:
            plan = _in_stages(plan_options, search, places, pins)
            why = error.what.rstrip(".")
            said = (
                "split into stages again, since the earlier stages are not possible:"
                f" {why}."
            )
            return replace(plan, notes=(*plan.notes, said))
    return _in_stages(plan_options, search, places, pins)


def _in_stages(
    plan_options: PlanOptions,
    search: Search,
    places: tuple[int, ...],
    stage_pins: Mapping[str, int],
    kept: Mapping[int, Part] = NOWHERE,
    enough_s: float = math.inf,
) -> PlanData:
    asked = as_requested(search, plan_options.recompute)
    may_recompute = plan_options.recompute == AUTO

    def in_one(beside: InOne = EVERY) -> PlanData:
        return plan_in_one_program(
            asked,
            places,
            plan_options.microbatches,
            plan_options.per_microbatch,
            may_recompute=may_recompute,
            asked=beside,
        )

    if plan_options.schedule == IN_ONE_PROGRAM:
        if stage_pins:
            raise _no_stage_pins(stage_pins)
        return in_one()
    is_free = plan_options.schedule == AUTO and not stage_pins and not kept
    may_be_one = is_free and {*places} == {1}
    as_tasks: PlanData | InfeasiblePlanError
    try:
        as_tasks = plan_stages(
            asked,
            places,
            plan_options.microbatches,
            plan_options.schedule,
            plan_options.per_microbatch,
            stage_pins,
            may_recompute=may_recompute,
            may_unroll=plan_options.loops == AUTO,
            kept=kept,
            enough_s=enough_s,
        )
    except InfeasiblePlanError as error:
        if not may_be_one:
            raise
        as_tasks = error
    if isinstance(as_tasks, PlanData) and not may_be_one:
        return as_tasks
    program = asked.running.program
    return or_in_one_program(
        as_tasks, program, len(places), plan_options.microbatches, in_one
    )


def _no_stage_pins(stage_pins: Mapping[str, int]) -> PinError:
    key, stage = next(iter(stage_pins.items()))
    return PinError(
        f"pin {key!r}: stages of one program have equal parts of every loop over"
        " layers, and share the rest.",
        where=repr(key),
        numbers=f"pinned to stage {stage}",
        fix="drop the pin, or take another schedule, as schedule='1f1b'.",
    )
