"""A step that is cut, by one schedule: its groups planned until all fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rhino_jax.errors import InfeasiblePlanError
from rhino_jax.pipeline.of_plan import schedule_of
from rhino_jax.pipeline.simulator import simulate
from rhino_jax.plan.plan import Plan
from rhino_jax.plan.stages import Pipeline, runs_of
from rhino_jax.planning.staging import when
from rhino_jax.planning.staging.assembled import assembled
from rhino_jax.planning.staging.costs import between_of, chunk_costs, hops_of
from rhino_jax.planning.staging.cuts import Asked, CutStep
from rhino_jax.planning.staging.groups import plan_groups
from rhino_jax.planning.staging.planned import FIX, PlannedGroup, Room
from rhino_jax.transform.staged.staging import staged
from rhino_jax.transform.staged.step import Step
from rhino_jax.units import format_bytes


MOST_TRIES = 3
"""To make room for what arrives early, which shows when all groups are planned."""


def fitted(asked: Asked, cut_step: CutStep, way: when.Way) -> Plan:
    """The plan of a step that is cut.

    Args:
      asked: what is planned.
      cut_step: the step.
      way: its schedule.
    Raises:
      InfeasiblePlanError: a group does not fit.
      ScheduleError: a schedule that is searched for does not.
    """
    search, of_step, shapes = asked.search, asked.of_step, cut_step.shapes
    limit = search.request.memory_budget_bytes

    def step_of(recomputed: frozenset[int]) -> Step:
        return staged(
            cut_step.apart,
            cut_step.chosen.stages,
            cut_step.group_of,
            is_split=way.is_split,
            recomputed=recomputed,
            is_twice=cut_step.work.is_twice,
        )

    would_recompute = ""
    if cut_step.has_backward:
        is_kept = not asked.may_recompute
        would_recompute = 'recompute="auto"' if is_kept else 'schedule="1f1b"'
    is_free = asked.may_recompute and cut_step.has_backward and not way.is_split
    room = Room(way.in_flight, (0,) * shapes.groups, is_free, would_recompute)
    for _ in range(MOST_TRIES):
        step, groups, recomputed = plan_groups(
            search, step_of, of_step, shapes, room, asked.finds
        )
        pipeline = _pipeline(asked, cut_step, way, step, groups)
        pipeline = replace(pipeline, recomputed=tuple(sorted(recomputed)))
        if cut_step.has_backward:
            pipeline = when.settled(pipeline, asked.schedule, limit)
        peaks = simulate(schedule_of(pipeline)).group_peak_bytes
        if max(peaks) <= limit:
            return assembled(
                search, of_step, step, groups, pipeline, shapes, asked.started
            )
        ahead = [
            max(0, peak - group.peak_bytes(step, in_flight)) if peak > limit else known
            for peak, group, in_flight, known in zip(
                peaks, groups, way.in_flight, room.ahead_bytes, strict=True
            )
        ]
        room = replace(room, ahead_bytes=tuple(ahead), recomputed=recomputed)
    worst = max(range(len(peaks)), key=lambda group: peaks[group])
    raise InfeasiblePlanError(
        f"stage {worst} does not fit with what reaches it early.",
        where=f"memory budget {format_bytes(int(limit))} per device",
        numbers=f"{format_bytes(peaks[worst])} at its peak by {way.name}",
        fix=FIX,
    )


def _pipeline(
    asked: Asked,
    cut_step: CutStep,
    way: when.Way,
    step: Step,
    groups: Sequence[PlannedGroup],
) -> Pipeline:
    return Pipeline(
        micro_batches=step.micro_batches,
        schedule=way.name,
        runs=runs_of(cut_step.chosen.stages),
        costs=chunk_costs(step, groups),
        hops=hops_of(step, groups, *cut_step.shapes.hop),
        per_microbatch=asked.places,
        parts=asked.of_step.count,
        group_of=cut_step.group_of,
        is_split=way.is_split,
        between=between_of(step, groups),
        is_twice=cut_step.work.is_twice,
    )
