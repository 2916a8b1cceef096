"""A plan of several stages."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from rhino_jax.errors import InfeasiblePlanError, ScheduleError, StageError
from rhino_jax.pipeline.of_plan import FORWARD_ONLY, schedule_of
from rhino_jax.pipeline.simulator import simulate
from rhino_jax.plan.plan import Plan
from rhino_jax.plan.stages import Pipeline, runs_of
from rhino_jax.planning.meshes import AUTO, MeshAxes
from rhino_jax.planning.search import Search
from rhino_jax.planning.staging import when
from rhino_jax.planning.staging.assembled import assembled
from rhino_jax.planning.staging.costs import between_of, chunk_costs, hops_of
from rhino_jax.planning.staging.cuts import (
    Asked,
    CutStep,
    counts_of,
    cuts_of,
    worth_comparing,
)
from rhino_jax.planning.staging.groups import PlannedGroup, plan_groups
from rhino_jax.transform.staged.stacks import Unstacked
from rhino_jax.transform.staged.staging import staged
from rhino_jax.transform.staged.step import Step
from rhino_jax.units import format_bytes


NO_PINS: Mapping[str, int] = {}

MOST_TRIES = 3
"""To make room for what arrives early, which shows when all groups are planned."""


def plan_stages(
    search: Search,
    shares: tuple[int, ...],
    microbatches: int | str,
    schedule: str,
    places: tuple[str, ...] = (),
    stage_pins: Mapping[str, int] = NO_PINS,
) -> Plan:
    """The plan of a step in so many stages.

    Args:
      search: of the step as its user wrote it.
      shares: of every group of devices, its places along the axis of the stages.
      microbatches: how many; "auto": the best of a few counts.
      schedule: name of a family, or "auto".
      places: where sums over the batch are those of a micro-batch.
      stage_pins: key → stage.
    Raises:
      StageError, MicrobatchError, InfeasiblePlanError, ScheduleError, PinError.
    """
    started = time.monotonic()
    when.check_runs(schedule)
    traced = search.running
    of_step = Unstacked.of(traced.closed_jaxpr, traced.program, shares)
    if of_step.count and schedule in when.SEVERAL:
        raise _stacks_are_whole(of_step, schedule)
    if of_step.count and min(shares) > 1:
        raise _no_group_of_one(of_step, shares)
    asked = Asked(search, of_step, shares, schedule, places, stage_pins, started)
    rounds = counts_of(asked, microbatches)
    for counts in rounds[:-1]:
        with contextlib.suppress(InfeasiblePlanError):
            return _best_of(asked, counts)
    return _best_of(asked, rounds[-1])


def _best_of(asked: Asked, counts: Sequence[int]) -> Plan:
    """The best of some numbers of micro-batches.

    Raises:
      InfeasiblePlanError: with none of them every group fits.
    """
    cuts: list[CutStep] = []
    meshes: Sequence[MeshAxes] = asked.search.meshes
    for count in counts:
        cuts += cuts_of(asked, meshes, count)
        meshes = worth_comparing(cuts[-1], max(counts))
    all_ways = _ways(cuts, asked.schedule)
    ways = when.tried(all_ways, asked.schedule)
    for i, way in enumerate(ways):
        try:
            plan = _planned(asked, cuts[way.cut], way)
        except (InfeasiblePlanError, ScheduleError):
            # More micro-batches, or fewer in flight, hold less.
            if i == len(ways) - 1:
                raise
            continue
        if asked.schedule != AUTO or not cuts[way.cut].has_backward:
            return plan
        assert plan.pipeline is not None
        if when.is_worth_it(plan.pipeline, plan.predicted.step_time_s):
            said = when.note(all_ways, [c.work for c in cuts], plan.schedule)
            return replace(plan, notes=(*plan.notes, said))
    raise AssertionError("nothing was tried")


def _stacks_are_whole(of_step: Unstacked, schedule: str) -> StageError:
    end = next(e for e in of_step.inputs if e.part is not None)
    path = of_step.program.inputs[of_step.inputs.index(end)].path
    return StageError(
        f"{schedule!r} runs several chunks in every stage, and layers are in one loop:"
        " a stack of weights lies over the stages, one part on each.",
        where=path,
        numbers=f"{of_step.count} parts of {of_step.sizes[0]} layers",
        fix='write layers one by one, or take "1f1b" or "zero-bubble".',
    )


def _no_group_of_one(of_step: Unstacked, shares: tuple[int, ...]) -> StageError:
    end = next(e for e in of_step.inputs if e.part is not None)
    path = of_step.program.inputs[of_step.inputs.index(end)].path
    return StageError(
        "layers are in one loop, and every group of devices is several times what all"
        " sizes divide by: stacks of weights lie in equal parts of such a size.",
        where=path,
        numbers="groups of " + " + ".join(map(str, shares)) + " such parts",
        fix="let the smallest group be of the size that the others divide by, as in"
        " [4, 2, 2], or write layers one by one.",
    )


def _ways(cuts: Sequence[CutStep], schedule: str) -> list[when.Way]:
    """Schedules of cuts, the best first."""
    if all(c.has_backward for c in cuts):
        return when.compared([c.work for c in cuts], schedule)
    order = sorted(range(len(cuts)), key=lambda i: cuts[i].chosen.step_time_s)
    one = (1,) * cuts[0].work.groups
    name = FORWARD_ONLY
    return [
        when.Way(i, name, False, cuts[i].chosen.step_time_s, True, one) for i in order
    ]


def _planned(asked: Asked, cut_step: CutStep, way: when.Way) -> Plan:
    """A step that is cut, with every group planned.

    Raises:
      InfeasiblePlanError: a group does not fit.
      ScheduleError: a schedule that is searched for does not.
    """
    search, of_step, shapes = asked.search, asked.of_step, cut_step.shapes
    step = staged(
        cut_step.apart,
        cut_step.chosen.stages,
        cut_step.group_of,
        is_split=way.is_split,
    )
    limit = search.request.memory_budget_bytes
    ahead = [0] * shapes.groups
    for _ in range(MOST_TRIES):
        groups = plan_groups(search, step, of_step, shapes, way.in_flight, ahead)
        pipeline = _pipeline(asked, cut_step, way, step, groups)
        peaks = simulate(schedule_of(pipeline)).group_peak_bytes
        if max(peaks) <= limit:
            return assembled(
                search, of_step, step, groups, pipeline, shapes, asked.started
            )
        over = [max(0, peak - int(limit)) for peak in peaks]
        ahead = [n + more for n, more in zip(ahead, over, strict=True)]
    group = peaks.index(max(peaks))
    raise InfeasiblePlanError(
        f"stage {group} does not fit with what reaches it early.",
        where=f"memory budget {format_bytes(int(limit))} per device",
        numbers=f"{format_bytes(peaks[group])} at its peak",
        fix="take more micro-batches, more stages or more devices.",
    )


def _pipeline(
    asked: Asked,
    cut_step: CutStep,
    way: when.Way,
    step: Step,
    groups: Sequence[PlannedGroup],
) -> Pipeline:
    """How micro-batches pass through planned groups."""
    pipeline = Pipeline(
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
    )
    if not cut_step.has_backward:
        return pipeline
    limit = asked.search.request.memory_budget_bytes
    return when.settled(pipeline, asked.schedule, limit)
