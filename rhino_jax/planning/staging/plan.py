"""A plan of several stages."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rhino_jax.errors import InfeasiblePlanError, ScheduleError, StageError
from rhino_jax.pipeline.cut.choose import cut
from rhino_jax.pipeline.cut.ops import Cut, Problem
from rhino_jax.pipeline.of_plan import FORWARD_ONLY
from rhino_jax.pipeline.work import Work
from rhino_jax.plan.plan import Plan
from rhino_jax.plan.stages import Pipeline, runs_of
from rhino_jax.planning.meshes import AUTO
from rhino_jax.planning.search import Search
from rhino_jax.planning.staging import when
from rhino_jax.planning.staging.assembled import assembled
from rhino_jax.planning.staging.costs import between_of, chunk_costs, hops_of
from rhino_jax.planning.staging.estimated import estimated
from rhino_jax.planning.staging.groups import plan_groups
from rhino_jax.planning.staging.pins import pinned_ops
from rhino_jax.planning.staging.problem import problem_of
from rhino_jax.planning.staging.shapes import Shapes, shapes_of
from rhino_jax.transform.microbatch.choice import Choice
from rhino_jax.transform.microbatch.cutting import find_cut
from rhino_jax.transform.staged.apart import Apart, take_apart
from rhino_jax.transform.staged.sides import Sides, sides_of
from rhino_jax.transform.staged.stacks import Unstacked
from rhino_jax.transform.staged.staging import staged, with_split_loops


MOST_OPS_OF_BEST = 1500
"""Forward ops of programs whose cut CP-SAT looks at; of more, orders are cut."""

NO_PINS: Mapping[str, int] = {}

PER_STAGE = ((2, 4, 8), (16,), (32,), (64,))
"""Micro-batches for every stage that are compared where rhino chooses, and those that
are tried after them where nothing fits: their activations are smaller."""


@dataclass(frozen=True, slots=True, eq=False)
class _Cut:
    """A step in so many micro-batches, and where it is cut.

    Attributes:
      apart: the step.
      shapes: of the groups.
      has_backward: whether there is a backward pass.
      chosen: the cut.
      group_of: of every chunk; empty where each has its own.
      work: what chunks take, by an estimate.
    """

    apart: Apart
    shapes: Shapes
    has_backward: bool
    chosen: Cut
    group_of: tuple[int, ...]
    work: Work


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
    rounds = _counts(of_step, len(shares), microbatches, places)
    for counts in rounds[:-1]:
        with contextlib.suppress(InfeasiblePlanError):
            return _best_of(
                search, of_step, shares, counts, schedule, places, stage_pins, started
            )
    return _best_of(
        search, of_step, shares, rounds[-1], schedule, places, stage_pins, started
    )


def _best_of(
    search: Search,
    of_step: Unstacked,
    shares: tuple[int, ...],
    counts: Sequence[int],
    schedule: str,
    places: tuple[str, ...],
    stage_pins: Mapping[str, int],
    started: float,
) -> Plan:
    """The best of some numbers of micro-batches.

    Raises:
      InfeasiblePlanError: with none of them every group fits.
    """
    cuts = [
        cut_step
        for count in counts
        for cut_step in _cuts(
            search, of_step, shares, count, schedule, places, stage_pins
        )
    ]
    all_ways = _ways(cuts, schedule)
    ways = when.tried(all_ways, schedule)
    for i, way in enumerate(ways):
        try:
            plan = _planned(
                search, of_step, cuts[way.cut], way, schedule, places, started
            )
        except (InfeasiblePlanError, ScheduleError):
            # More micro-batches, or fewer in flight, hold less.
            if i == len(ways) - 1:
                raise
            continue
        if schedule != AUTO or not cuts[way.cut].has_backward:
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


def _ways(cuts: Sequence[_Cut], schedule: str) -> list[when.Way]:
    """Schedules of cuts, the best first."""
    if all(c.has_backward for c in cuts):
        return when.compared([c.work for c in cuts], schedule)
    order = sorted(range(len(cuts)), key=lambda i: cuts[i].chosen.step_time_s)
    one = (1,) * cuts[0].work.groups
    name = FORWARD_ONLY
    return [
        when.Way(i, name, False, cuts[i].chosen.step_time_s, True, one) for i in order
    ]


def _planned(
    search: Search,
    of_step: Unstacked,
    cut_step: _Cut,
    way: when.Way,
    schedule: str,
    places: tuple[str, ...],
    started: float,
) -> Plan:
    """A step that is cut, with every group planned.

    Raises:
      InfeasiblePlanError: a group does not fit.
      ScheduleError: a schedule that is searched for does not.
    """
    chosen = cut_step.chosen
    step = staged(
        cut_step.apart, chosen.stages, cut_step.group_of, is_split=way.is_split
    )
    shapes = cut_step.shapes
    groups = plan_groups(search, step, of_step, shapes, way.in_flight)
    pipeline = Pipeline(
        micro_batches=step.micro_batches,
        schedule=way.name,
        runs=runs_of(chosen.stages),
        costs=chunk_costs(step, groups),
        hops=hops_of(step, groups, *shapes.hop),
        per_microbatch=places,
        parts=of_step.count,
        group_of=cut_step.group_of,
        is_split=way.is_split,
        between=between_of(step, groups),
    )
    if cut_step.has_backward:
        limit = search.request.memory_budget_bytes
        pipeline = when.settled(pipeline, schedule, limit)
    return assembled(search, of_step, step, groups, pipeline, shapes, started)


def _cuts(
    search: Search,
    of_step: Unstacked,
    shares: tuple[int, ...],
    count: int,
    schedule: str,
    places: tuple[str, ...],
    stage_pins: Mapping[str, int],
) -> list[_Cut]:
    """A step in `count` micro-batches, cut where that is best: into a chunk for every
    stage, and several, as the schedule may need."""
    apart = take_apart(of_step.closed, of_step.program, count, places)
    sides = sides_of(apart)
    if sides.is_coupled:
        when.check_runs_coupled(schedule, apart.cut.why)
    shapes = shapes_of(search, sides, shares)
    pins = pinned_ops(stage_pins, of_step, apart, sides)
    found: list[_Cut] = []
    known: dict[tuple[int, ...], tuple[Problem, Cut]] = {}
    for group_of in when.placements(schedule, shapes.groups):
        chunks = len(group_of)
        is_asked = not found
        # A pinned op is in the only chunk of its stage.
        is_one = of_step.count or stage_pins or sides.is_coupled
        if not is_asked and (is_one or not sides.backward):
            continue
        sizes = tuple(shares[group] for group in group_of)
        try:
            if sizes not in known:
                known[sizes] = _cut_into(search, sides, shapes, group_of, count, pins)
        except (StageError, InfeasiblePlanError):
            if is_asked:
                raise
            continue
        problem, chosen = known[sizes]
        apart_too = sides, shapes
        if when.may_split(schedule) and sides.backward:
            loops = with_split_loops(apart, chosen.stages, group_of)
            if loops is not apart:
                of_loops = sides_of(loops)
                apart_too = of_loops, shapes_of(search, of_loops, shares)
        work = estimated(problem, chosen, *apart_too, group_of)
        own = group_of if chunks > shapes.groups else ()
        back = bool(sides.backward)
        found.append(_Cut(apart, shapes, back, chosen, own, work))
    return found


def _cut_into(
    search: Search,
    sides: Sides,
    shapes: Shapes,
    group_of: tuple[int, ...],
    count: int,
    pins: Mapping[int, int],
) -> tuple[Problem, Cut]:
    """Where a step in `count` micro-batches is best cut."""
    request = search.request
    limit = request.memory_budget_bytes
    problem = problem_of(sides, shapes, group_of, count, limit, pins)
    level = request.level if len(sides.forward) <= MOST_OPS_OF_BEST else "fast"
    try:
        return problem, cut(problem, level, seed=request.seed)
    except InfeasiblePlanError:
        # What optimizers hold is a guess here; when groups are planned it is known.
        groups = tuple(replace(g, limit_bytes=None) for g in problem.groups)
        problem = replace(problem, groups=groups)
        return problem, cut(problem, level, seed=request.seed)


def _counts(
    of_step: Unstacked, stages: int, microbatches: int | str, places: tuple[str, ...]
) -> list[list[int]]:
    """Numbers of micro-batches to be compared; each list where nothing of those before
    fits."""
    if isinstance(microbatches, int):
        return [[microbatches]]
    choice = Choice(2, per_microbatch=places)
    rows = find_cut(of_step.closed, of_step.program, choice)[0].rows
    counts = [n for n in range(2, rows + 1) if rows % n == 0]
    rounds: list[list[int]] = []
    seen = set[int]()
    for factors in PER_STAGE:
        near = (
            min(counts, key=lambda n: (abs(math.log(n / (k * stages))), n))
            for k in factors
        )
        found = [n for n in dict.fromkeys(near) if n not in seen]
        seen.update(found)
        rounds += [found] if found else []
    return rounds
