"""The plan of a cut step by one schedule, with all submeshes planned to fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial

from rhino_jax.passes.staged.in_slices import staged_in_slices
from rhino_jax.passes.staged.remat import StagedRemat
from rhino_jax.passes.staged.sides import Sides, sides_of
from rhino_jax.passes.staged.staging import staged
from rhino_jax.passes.staged.step import StagedStep
from rhino_jax.pipeline.schedules.searched import SEARCHED
from rhino_jax.plan.plan import PlanData
from rhino_jax.plan.stages import Pipeline, runs_of
from rhino_jax.planner.staging import schedules
from rhino_jax.planner.staging.cuts import CutStep, StagingRequest
from rhino_jax.planner.staging.groups import plan_groups
from rhino_jax.planner.staging.planned import PlannedGroup, Room
from rhino_jax.planner.staging.solved import SolvedStages, run_that_fits
from rhino_jax.planner.staging.transfers import with_costs
from rhino_jax.planner.variant_search import tell_nobody


def fit_stages(
    asked: StagingRequest, cut_step: CutStep, candidate: schedules.EstimatedSchedule
) -> PlanData:
    """Return the plan of a cut step by one schedule.

    Args:
      asked: the step to plan.
      cut_step: the step, cut into stages.
      candidate: its schedule.
    Raises:
      InfeasiblePlanError: a submesh does not fit.
      ScheduleError: a searched schedule does not fit.
    """
    search, of_step, shapes = asked.search, asked.of_step, cut_step.shapes
    together = of_step.together

    def step_of(remat: StagedRemat) -> StagedStep:
        if cut_step.slices:
            groups = range(shapes.groups)
            stages, lengths = cut_step.chosen.stages, cut_step.slices
            own = partial(staged_in_slices, remat=remat, together=together)
            return own(cut_step.apart, stages, groups, lengths)
        return staged(
            cut_step.apart,
            cut_step.chosen.stages,
            cut_step.group_of,
            is_split=candidate.is_split,
            remat=remat,
            together=together,
        )

    @cache
    def sides() -> Sides:
        return sides_of(cut_step.apart)

    would_recompute = ""
    if cut_step.has_backward:
        is_kept = not search.options.may_recompute
        usual = schedules.usual(cut_step.work)
        would_recompute = 'recompute="auto"' if is_kept else f'schedule="{usual}"'
    is_free = search.options.may_recompute and cut_step.has_backward
    # The search for schedules does not simulate links to hosts.
    host_bytes_per_s = search.target.device.host_bytes_per_s
    room = Room(
        candidate.in_flight,
        (0,) * shapes.groups,
        is_free,
        candidate.is_split,
        None if candidate.name == SEARCHED else host_bytes_per_s,
        would_recompute,
    )
    run = run_that_fits(
        lambda room: plan_groups(
            search,
            step_of,
            of_step,
            shapes,
            room,
            asked.finds,
            # Values of sequence slices are not chosen one by one.
            sides=None if cut_step.slices else sides,
        ),
        lambda *planned: _pipeline(asked, cut_step, candidate, *planned),
        room,
        search.request.memory_budget_bytes,
    )
    # Later questions report no progress, and are not dumped as passes of this search.
    quiet = replace(search.asking(watch=None), report=tell_nobody)
    solved = SolvedStages(quiet, of_step, shapes, run)
    return solved.plan(asked.started)


def _pipeline(
    asked: StagingRequest,
    cut_step: CutStep,
    candidate: schedules.EstimatedSchedule,
    step: StagedStep,
    groups: Sequence[PlannedGroup],
    remat: StagedRemat,
) -> Pipeline:
    by_stage = tuple(group.remat for group in groups)
    pipeline = Pipeline(
        micro_batches=step.micro_batches,
        schedule=candidate.name,
        runs=runs_of(cut_step.chosen.stages),
        costs=(),
        hops=(),
        per_microbatch=asked.places,
        group_of=step.chunks if cut_step.slices else cut_step.group_of,
        is_split=candidate.is_split,
        recomputed=tuple(sorted(remat.chunks)),
        remat=by_stage if any(x.choice for x in by_stage) else (),
        slices=cut_step.slices,
        unrolled_trips=asked.of_step.unrolled_trips,
    )
    pipeline = with_costs(pipeline, step, groups, cut_step.shapes)
    if pipeline.is_offloaded:
        # Offloaded values are transferred in the order of this schedule.
        rate = asked.search.target.device.host_bytes_per_s
        return replace(pipeline, host_bytes_per_s=rate or 0.0)
    if not cut_step.has_backward:
        return pipeline
    limit = asked.search.request.memory_budget_bytes
    return schedules.settle(pipeline, asked.schedule, limit)
