"""Comparison of an SPMD pipeline with stages that run as tasks.

An SPMD pipeline dispatches one program, wherever its devices are, and shares everything
outside of layers among all stages. Every stage computes on every tick, though, even
without a micro-batch, and the layers' residuals are copied on each.

Both are compared by the simulated step, tasks with their dispatch time. Tasks are the
default: they have their own stages, and any cut. An SPMD pipeline is planned where a
lower bound on its step is clearly below, and taken where the step is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from rhino_jax.errors import (
    InfeasiblePlanError,
    MicrobatchError,
    PinError,
    StageError,
)
from rhino_jax.ir.program import Program, Region, RegionKind
from rhino_jax.pipeline.of_plan import schedule_of
from rhino_jax.pipeline.simulator import simulate
from rhino_jax.pipeline.work import work_of
from rhino_jax.plan.plan import PlanData
from rhino_jax.planner.decision import NotFaster
from rhino_jax.planner.staging.auto import flops_of
from rhino_jax.planner.staging.cuts import PER_STAGE
from rhino_jax.planner.staging.schedules import DISPATCH_S
from rhino_jax.planner.staging.spmd_pipeline.planned import StageBaseline
from rhino_jax.planner.variant_search import MIN_GAIN
from rhino_jax.units import format_seconds


NOT_POSSIBLE = (InfeasiblePlanError, StageError, MicrobatchError, PinError)
"""Errors where stages cannot be an SPMD pipeline."""


def or_in_one_program(
    as_tasks: PlanData | InfeasiblePlanError,
    program: Program,
    stages: int,
    microbatches: int | str,
    plan_in_one: Callable[[StageBaseline], PlanData],
) -> PlanData:
    """Return the plan whose stages run as tasks; or an SPMD pipeline, where tasks do
    not fit or take clearly longer.

    Args:
      as_tasks: the plan as tasks, or the error where there is none.
      program: the program to plan.
      stages: the number of stages, on equal submeshes.
      microbatches: the number of micro-batches, or "auto".
      plan_in_one: plans an SPMD pipeline, if that may be fast enough.
    Raises:
      InfeasiblePlanError: `as_tasks`, where an SPMD pipeline does not fit either.
    """
    share = share_of_layers(program, stages)
    is_int = isinstance(microbatches, int)
    if not share or (is_int and int(microbatches) % stages):
        return _given(as_tasks)
    if isinstance(as_tasks, InfeasiblePlanError):
        try:
            plan = plan_in_one(StageBaseline())
        except NOT_POSSIBLE:
            raise as_tasks from None
        return _noted(plan, "stages are one program: as tasks nothing fits.")
    tasks_s = dispatched_s(as_tasks)
    enough_s = (1 - MIN_GAIN) * tasks_s
    most = int(microbatches) if is_int else max(PER_STAGE[0]) * stages
    if least_s(as_tasks, share, most) >= enough_s:
        return as_tasks
    own_s = as_tasks.predicted.step_time_s
    tasks = f"as tasks {format_seconds(own_s)} and {format_seconds(tasks_s - own_s)} of"
    tasks += f" starts, {format_seconds(DISPATCH_S)} each"

    def may_do(count: int) -> bool:
        return least_s(as_tasks, share, count) < enough_s

    try:
        plan = plan_in_one(StageBaseline(enough_s, may_do))
    except NotFaster as slower:
        if math.isinf(slower.step_s):
            return as_tasks
        took = f"{format_seconds(slower.step_s)} in {slower.count} micro-batches"
        return _noted(as_tasks, f"stages were compared: {tasks}; one program {took}.")
    except NOT_POSSIBLE:
        return as_tasks
    took = format_seconds(plan.predicted.step_time_s)
    return _noted(plan, f"stages are one program: {took} a step; {tasks}.")


def share_of_layers(program: Program, stages: int) -> float:
    """Return the share of a step's FLOPs that is in loops which `stages` divides."""

    def within(region: Region) -> float:
        total = 0.0
        for op in (program.ops[o] for o in region.ops):
            if (call := op.call) is None:
                continue
            parts = sum(map(within, call.regions))
            is_loop = call.kind is RegionKind.SCAN and call.trip_count > 1
            if is_loop and call.trip_count % stages == 0:
                parts = sum(_flops(program, region) for region in call.regions)
            total += call.trip_count * parts
        return total

    every = flops_of(program)
    return within(program.body) / every if every else 0.0


def _flops(program: Program, region: Region) -> float:
    return flops_of(replace(program, body=region))


def least_s(as_tasks: PlanData, share: float, count: int) -> float:
    """Return a lower bound on the step of an SPMD pipeline in seconds: stages have
    equal parts of the tasks' work, the layers' on all ticks, and nothing is copied,
    sent or computed twice.

    Args:
      as_tasks: the plan whose stages run as tasks.
      share: share of the step that is in layers.
      count: maximum number of micro-batches.
    """
    pipeline = as_tasks.pipeline
    assert pipeline is not None
    busy = pipeline.busy_s
    ticks = (count + len(busy) - 1) / count
    return sum(busy) / len(busy) * (share * ticks + 1 - share)


def dispatched_s(as_tasks: PlanData) -> float:
    """Return the step of tasks in seconds, with their dispatch (`DISPATCH_S`)."""
    pipeline = as_tasks.pipeline
    assert pipeline is not None
    work = replace(work_of(pipeline), dispatch_s=DISPATCH_S)
    return simulate(schedule_of(pipeline, work)).step_time_s


def _noted(plan: PlanData, note: str) -> PlanData:
    return replace(plan, notes=(*plan.notes, note))


def _given(as_tasks: PlanData | InfeasiblePlanError) -> PlanData:
    if isinstance(as_tasks, InfeasiblePlanError):
        raise as_tasks
    return as_tasks
