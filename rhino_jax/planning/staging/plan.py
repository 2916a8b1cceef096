"""A plan of several stages."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from rhino_jax.errors import (
    InfeasiblePlanError,
    PinError,
    ScheduleError,
    StageError,
    StageOrderError,
)
from rhino_jax.pipeline.of_plan import FORWARD_ONLY
from rhino_jax.plan.plan import Plan
from rhino_jax.planning.meshes import AUTO, MeshAxes
from rhino_jax.planning.search import Search
from rhino_jax.planning.staging import when
from rhino_jax.planning.staging.counts import counts_of, rows_of
from rhino_jax.planning.staging.cuts import (
    Asked,
    CutStep,
    cuts_of,
    worth_comparing,
)
from rhino_jax.planning.staging.fitted import fitted
from rhino_jax.transform.staged.stacks import Unstacked


NO_PINS: Mapping[str, int] = {}

IDLE = 0.1
"""Of the busiest stage's time: stages with less are called idle, in a note."""


def plan_stages(
    search: Search,
    shares: tuple[int, ...],
    microbatches: int | str,
    schedule: str,
    places: tuple[str, ...] = (),
    stage_pins: Mapping[str, int] = NO_PINS,
    *,
    may_recompute: bool = False,
) -> Plan:
    """The plan of a step in so many stages.

    Args:
      search: of the step as its user wrote it.
      shares: of every group of devices, its places along the axis of the stages.
      microbatches: how many; "auto": the best of a few counts.
      schedule: name of a family, or "auto".
      places: where sums over the batch are those of a micro-batch.
      stage_pins: key → stage.
      may_recompute: whether stages that do not fit may run their forward passes again.
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
    asked = Asked(
        search, of_step, shares, schedule, places, stage_pins, started, may_recompute
    )
    try:
        plan = _fastest(asked, microbatches)
    except (StageOrderError, PinError):
        if not of_step.count:
            raise
        # Loops stay whole where one follows another, as a decoder's layers an
        # encoder's, or a stack as a whole is pinned.
        whole = Unstacked.none(traced.closed_jaxpr, traced.program)
        plan = _fastest(replace(asked, of_step=whole), microbatches)
    return replace(plan, notes=(*plan.notes, *_idle(plan)))


def _idle(plan: Plan) -> Iterator[str]:
    """On stages that have almost nothing to do."""
    assert plan.pipeline is not None
    busy = plan.pipeline.busy_s
    idle = [i for i, seconds in enumerate(busy) if seconds < IDLE * max(busy)]
    if idle:
        yield (
            f"almost nothing to do for stage {', '.join(map(str, idle))}: a loop over"
            " layers is cut only where it is the only one of its length, and stages"
            " divide that; layers written one by one are cut anywhere."
        )


def _fastest(asked: Asked, microbatches: int | str) -> Plan:
    """The fastest plan of the numbers of micro-batches that are asked for."""
    may_recompute = asked.may_recompute
    best: Plan | None = None
    rounds = _counts(asked, microbatches)
    for i, counts in enumerate(rounds):
        # Once a plan recomputes, only plans that do not may be faster.
        asked = replace(asked, may_recompute=may_recompute and best is None)
        try:
            plan = _best_of(asked, counts)
        except InfeasiblePlanError:
            if best is None and i == len(rounds) - 1:
                raise
            continue
        if best is None or _seconds(plan) < _seconds(best):
            best = plan
        if not _is_recomputed(plan):
            break
    assert best is not None, "nothing was tried"
    return best


def _counts(asked: Asked, microbatches: int | str) -> list[list[int]]:
    """See `counts_of`."""
    if isinstance(microbatches, int):
        return [[microbatches]]
    of_step = asked.of_step
    rows = rows_of(of_step.closed, of_step.program, asked.places)
    return [*counts_of(rows, len(asked.shares))]


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
    best: Plan | None = None
    refused: InfeasiblePlanError | ScheduleError | None = None
    for way in ways:
        if best is not None and not _may_be_faster(best, way):
            continue
        try:
            plan = fitted(asked, cuts[way.cut], way)
        except (InfeasiblePlanError, ScheduleError) as error:
            # More micro-batches, or fewer in flight, hold less.
            refused = error
            continue
        if asked.schedule == AUTO and cuts[way.cut].has_backward:
            assert plan.pipeline is not None
            if not when.is_worth_it(plan.pipeline, plan.predicted.step_time_s):
                continue
            said = when.note(all_ways, [c.work for c in cuts], plan.schedule)
            plan = replace(plan, notes=(*plan.notes, said))
        if best is None or _seconds(plan) < _seconds(best):
            best = plan
    if best is not None:
        return best
    assert refused is not None, "nothing was tried"
    raise refused


def _may_be_faster(plan: Plan, way: when.Way) -> bool:
    """Whether a way may make a faster plan than one that was tried before: where that
    had to recompute; or by recomputing, where it does not fit else."""
    least_s = way.step_time_s if _is_recomputed(plan) else way.recomputed_s
    return least_s < _seconds(plan)


def _is_recomputed(plan: Plan) -> bool:
    assert plan.pipeline is not None
    return plan.pipeline.is_remade


def _seconds(plan: Plan) -> float:
    return plan.predicted.step_time_s


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
        when.Way(i, name, False, cuts[i].chosen.step_time_s, True, one, is_usual=True)
        for i in order
    ]
