"""A plan of several stages."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

from rhino_jax.errors import InfeasiblePlanError, ScheduleError
from rhino_jax.hardware.layout import lay_out
from rhino_jax.pipeline.cut.choose import cut
from rhino_jax.pipeline.cut.ops import IN_FLIGHT, Cut
from rhino_jax.pipeline.of_plan import FORWARD_ONLY, work_of
from rhino_jax.pipeline.schedules.table import TABLE, fastest
from rhino_jax.pipeline.simulator import simulate
from rhino_jax.plan.plan import Plan
from rhino_jax.plan.stages import Pipeline, runs_of
from rhino_jax.planning.meshes import AUTO, STAGE_AXIS, MeshAxes
from rhino_jax.planning.search import Search
from rhino_jax.planning.staging.assembled import assembled
from rhino_jax.planning.staging.costs import hops_of, stage_cost
from rhino_jax.planning.staging.groups import plan_groups
from rhino_jax.planning.staging.priced import seconds_by_op
from rhino_jax.planning.staging.problem import problem_of
from rhino_jax.search.driver import find
from rhino_jax.transform.microbatch.choice import Choice
from rhino_jax.transform.microbatch.cutting import find_cut
from rhino_jax.transform.staged.apart import Apart, take_apart
from rhino_jax.transform.staged.sides import Sides, sides_of
from rhino_jax.transform.staged.stacks import Unstacked
from rhino_jax.transform.staged.staging import staged


MOST_OPS_OF_BEST = 1500
"""Forward ops of programs whose cut CP-SAT looks at; of more, orders are cut."""


RUN = ("1f1b", "gpipe", "kfkb")
"""Schedules that are run: one chunk in every group, backward passes whole."""

LEAST_GAIN = 0.02
"""Of a simulated step, for a schedule that holds more memory than 1F1B."""

PER_STAGE = (2, 4, 8)
"""Micro-batches for every stage that are compared where rhino chooses."""


@dataclass(frozen=True, slots=True, eq=False)
class _Cut:
    """A step in so many micro-batches, and where it is cut.

    Attributes:
      apart: the step.
      mesh_axes: of all devices.
      hop: bytes per second, and latency, between groups.
      has_backward: whether there is a backward pass.
      chosen: the cut.
    """

    apart: Apart
    mesh_axes: MeshAxes
    hop: tuple[float, float]
    has_backward: bool
    chosen: Cut


def plan_stages(
    search: Search,
    stages: int,
    microbatches: int | str,
    schedule: str,
    places: tuple[str, ...] = (),
) -> Plan:
    """The plan of a step in so many stages.

    Args:
      search: of the step as its user wrote it.
      stages: how many groups of devices.
      microbatches: how many; "auto": the best of a few counts.
      schedule: name of a family, or "auto".
      places: where sums over the batch are those of a micro-batch.
    Raises:
      StageError, MicrobatchError, InfeasiblePlanError, ScheduleError.
    """
    started = time.monotonic()
    if schedule not in (AUTO, *RUN):
        raise ScheduleError(
            f"stages do not run by the schedule {schedule!r}.",
            where="`schedule=`",
            numbers=f"run: {', '.join(RUN)}",
            fix='take one of these, or "auto".',
        )
    traced = search.running
    of_step = Unstacked.of(traced.closed_jaxpr, traced.program, stages)
    counts = _counts(of_step, stages, microbatches, places)
    cuts = [_cut_into(search, of_step, stages, count, places) for count in counts]
    cuts.sort(key=lambda c: c.chosen.step_time_s)
    for i, found in enumerate(cuts):
        try:
            return _planned(search, of_step, found, schedule, places, started)
        except InfeasiblePlanError:
            # More micro-batches hold less each.
            if i == len(cuts) - 1:
                raise
    raise AssertionError("nothing was tried")


def _planned(
    search: Search,
    of_step: Unstacked,
    cut_step: _Cut,
    schedule: str,
    places: tuple[str, ...],
    started: float,
) -> Plan:
    """A step that is cut, with every group planned.

    Raises:
      InfeasiblePlanError: a group does not fit.
    """
    step = staged(cut_step.apart, cut_step.chosen.stages)
    flights = IN_FLIGHT["gpipe" if schedule == "gpipe" else "1f1b"]
    in_flight = flights(step.groups, step.micro_batches)
    own = _own(cut_step.mesh_axes)
    groups = plan_groups(search, step, of_step, own, in_flight)
    pipeline = Pipeline(
        micro_batches=step.micro_batches,
        schedule=schedule,
        runs=runs_of(cut_step.chosen.stages),
        costs=tuple(stage_cost(step, g) for g in groups),
        hops=hops_of(step, groups, *cut_step.hop),
        per_microbatch=places,
        parts=of_step.count,
    )
    if not cut_step.has_backward:
        pipeline = replace(pipeline, schedule=FORWARD_ONLY)
    elif schedule == AUTO:
        pipeline = _with_fastest(pipeline, search.request.memory_budget_bytes)
    axes = cut_step.mesh_axes
    return assembled(search, of_step, step, groups, pipeline, axes, started)


def _with_fastest(pipeline: Pipeline, limit_bytes: float) -> Pipeline:
    """By 1F1B, which holds the least; or by what fits and is clearly faster."""
    limit = int(limit_bytes) if math.isfinite(limit_bytes) else 0
    work = work_of(pipeline, limit)
    usual_s = simulate(TABLE[RUN[0]].build(work)).step_time_s
    try:
        found = fastest(work, RUN)
    except ScheduleError:
        return replace(pipeline, schedule=RUN[0])
    is_clear = found.step_time_s < (1 - LEAST_GAIN) * usual_s
    return replace(pipeline, schedule=found.schedule.name if is_clear else RUN[0])


def _cut_into(
    search: Search,
    of_step: Unstacked,
    stages: int,
    count: int,
    places: tuple[str, ...],
) -> _Cut:
    """A step in `count` micro-batches, cut where that is best."""
    request = search.request
    apart = take_apart(of_step.closed, of_step.program, count, places)
    sides = sides_of(apart)
    mesh_axes, seconds = _on_a_group(search, sides)
    at = [name for name, _ in mesh_axes].index(STAGE_AXIS)
    link = lay_out(search.target, mesh_axes).axes[at]
    hop = link.bytes_per_s, link.alpha_s
    problem = problem_of(
        sides,
        seconds,
        stages,
        math.prod(size for _, size in mesh_axes) // stages,
        count,
        hop,
        request.memory_budget_bytes,
        _pinned(of_step, apart, sides),
    )
    level = request.level if len(sides.forward) <= MOST_OPS_OF_BEST else "fast"
    try:
        chosen = cut(problem, level, seed=request.seed)
    except InfeasiblePlanError:
        # What optimizers hold is a guess here; when groups are planned it is known.
        groups = tuple(replace(g, limit_bytes=None) for g in problem.groups)
        chosen = cut(replace(problem, groups=groups), level, seed=request.seed)
    return _Cut(apart, mesh_axes, hop, bool(sides.backward), chosen)


def _pinned(of_step: Unstacked, apart: Apart, sides: Sides) -> dict[int, int]:
    """Forward ops that read a part of a stack are in the stage of that number."""
    found = {}
    for value, sources in zip(sides.lines.inputs[1:], apart.sources, strict=True):
        parts = {of_step.inputs[i].part for i in sources - apart.data} - {None}
        for i in sides.readers.get(value, ()) if len(parts) == 1 else ():
            if i in sides.forward:
                found[i] = int(next(iter(parts)) or 0)
    return found


def _counts(
    of_step: Unstacked, stages: int, microbatches: int | str, places: tuple[str, ...]
) -> list[int]:
    """Numbers of micro-batches to be compared."""
    if isinstance(microbatches, int):
        return [microbatches]
    choice = Choice(2, per_microbatch=places)
    rows = find_cut(of_step.closed, of_step.program, choice)[0].rows
    counts = [n for n in range(2, rows + 1) if rows % n == 0]
    near = [
        min(counts, key=lambda n: (abs(math.log(n / (k * stages))), n))
        for k in PER_STAGE
    ]
    return list(dict.fromkeys(near))


def _own(mesh_axes: MeshAxes) -> MeshAxes:
    """Of one group."""
    return tuple((n, 1 if n == STAGE_AXIS else size) for n, size in mesh_axes)


def _on_a_group(search: Search, sides: Sides) -> tuple[MeshAxes, dict[int, float]]:
    """The best of the meshes for a whole micro-batch on one group, and what its ops
    take there."""
    asked = replace(
        search.request,
        pins={},
        output_pins={},
        value_pins={},
        has_recipes=False,
        level="fast",
        memory_budget_bytes=math.inf,
    )
    own = [_own(axes) for axes in search.meshes]
    found = find(sides.program, own, search.target, asked)
    mesh = found.solved[0].mesh_problem.model.mesh
    axes = tuple((a.name, a.size) for a in mesh.axes)
    of = dict(zip(own, search.meshes, strict=True))
    return of[axes], seconds_by_op(found)
