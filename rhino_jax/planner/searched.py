"""From a search to a plan: on one mesh, or in pipeline stages."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from rhino_jax.errors import InfeasiblePlanError, PinError, StageError
from rhino_jax.plan.plan import PlanData
from rhino_jax.plan.stages import IN_ONE_PROGRAM, STAGE_AXIS
from rhino_jax.planner.corrected import corrected_plan
from rhino_jax.planner.cuts import as_requested, best_cut
from rhino_jax.planner.decision import AS_WRITTEN, AUTO, noted, row_of
from rhino_jax.planner.forms import in_best_forms
from rhino_jax.planner.meshes import candidates, where_pins_hold
from rhino_jax.planner.search.passes import TRACE, Dump
from rhino_jax.planner.staging.auto import with_stages
from rhino_jax.planner.staging.plan import plan_stages
from rhino_jax.planner.staging.spmd_pipeline.planned import (
    or_in_one_program,
    plan_in_one_program,
)
from rhino_jax.planner.variant_search import Search
from rhino_jax.utils.progress import shown


if TYPE_CHECKING:
    from rhino_jax.planner.options import PlanOptions


def search_for(
    search: Search, places: tuple[int, ...], plan_options: PlanOptions
) -> PlanData:
    """Search on one mesh, in pipeline stages, or both, and report the time of the whole
    comparison.

    Args:
      search: the search of the user's function.
      places: number of places of each stage along the stage axis; a single stage where
        the user gave no number: then more stages are compared where they may be faster.
      plan_options: say where passes are dumped and progress is shown.
    Raises:
      InfeasiblePlanError, MicrobatchError, StageError, ScheduleError.
    """
    started = time.monotonic()
    if plan_options.dump is not None:
        watch = Dump(plan_options.dump, search.what)
        watch(TRACE, search.traced)
        search = search.asking(watch=watch)
    with shown(plan_options.progress) as report:
        plan = in_best_forms(
            search.asking(progress=report), lambda each: _plan(each, places)
        )
    notes, known = plan.notes, search.request.corrections
    asked = search.options.schedule
    if len(places) == 1 and asked != AUTO and plan.num_stages == 1:
        notes += (f"schedule={asked!r} has no effect: the plan has one stage.",)
    if known.programs and not (search.refine == AUTO and plan.refined):
        notes += (
            f"costs are corrected by {known}, from earlier plans of this"
            " program with refine='auto'.",
        )
        plan = replace(plan, corrections=known)
    # The chosen variant was compared by the step time and peak of a brief search.
    variants = tuple(
        row_of(v.name, plan, is_chosen=True) if v.is_chosen else v
        for v in plan.variants
    )
    report_of = replace(plan.search, seconds=time.monotonic() - started)
    return replace(plan, search=report_of, notes=notes, variants=variants)


def _plan(search: Search, places: tuple[int, ...]) -> PlanData:
    asked = search.options
    if len(places) > 1:
        if search.storage and search.storage != AS_WRITTEN:
            raise StageError(
                "several stages store no fused weights in blocks.",
                where="`storage=` and `stages=`",
                numbers=f"{len(places)} stages",
                fix=f"plan with storage={AS_WRITTEN!r}, or with stages=1.",
            )
        try:
            return _in_stages(search, places)
        except (StageError, PinError, InfeasiblePlanError) as error:
            if not search.kept:
                raise
            why = error.what.rstrip(".")
        # Another plan's cuts are not possible any more.
        return noted(
            _in_stages(replace(search, kept={}), places),
            "split into stages again, since the earlier stages are not possible:"
            f" {why}.",
        )
    if asked.schedule == IN_ONE_PROGRAM:
        raise StageError(
            f"{search.what}: schedule={IN_ONE_PROGRAM!r} is of several"
            " stages, and nobody said how many.",
            where="`schedule=` and `stages=`",
            numbers="one stage",
            fix=f"give stages=2, say, or a mesh with an axis `{STAGE_AXIS}`.",
        )
    may_have_stages = (
        asked.stages == AUTO
        and search.mesh is None
        and search.storage == AS_WRITTEN
        and asked.microbatches != 1
        and not search.refine
    )
    if search.refine == AUTO:
        return corrected_plan(search, best_cut)
    if not may_have_stages:
        return best_cut(search)
    on_one: PlanData | InfeasiblePlanError
    try:
        on_one = best_cut(search)
    except InfeasiblePlanError as error:
        # Stages cannot lower the evenly divided peak.
        if (error.divided_peak_bytes or 0) > search.request.memory_budget_bytes:
            raise
        on_one = error

    def plan_in(groups: tuple[int, ...], enough_s: float) -> PlanData:
        every = candidates(search.traced, search.target, search.devices, groups)
        own, pins = where_pins_hold(every, search.pinned, search.traced.program)
        more = search.asking(
            pins=pins.inputs, output_pins=pins.outputs, value_pins=pins.values
        )
        return _in_stages(more.on(*own), groups, enough_s)

    return with_stages(on_one, search, plan_in)


def _in_stages(
    search: Search, places: tuple[int, ...], enough_s: float = math.inf
) -> PlanData:
    search, asked = as_requested(search), search.options
    if asked.schedule == IN_ONE_PROGRAM:
        for key, stage in search.stage_pins.items():
            raise PinError(
                f"pin {key!r}: stages of one program have equal parts of every loop"
                " over layers, and share the rest.",
                where=repr(key),
                numbers=f"pinned to stage {stage}",
                fix="drop the pin, or take another schedule, as schedule='1f1b'.",
            )
        return plan_in_one_program(search, places)
    is_free = asked.schedule == AUTO and not search.stage_pins and not search.kept
    if not is_free or {*places} != {1}:
        return plan_stages(search, places, enough_s)
    as_tasks: PlanData | InfeasiblePlanError
    try:
        as_tasks = plan_stages(search, places, enough_s)
    except InfeasiblePlanError as error:
        as_tasks = error
    return or_in_one_program(
        as_tasks,
        search.running.program,
        len(places),
        asked.microbatches,
        lambda beside: plan_in_one_program(search, places, beside),
    )
