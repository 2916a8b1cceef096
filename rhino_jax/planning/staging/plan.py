"""A plan of several stages."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace

from rhino_jax.hardware.layout import lay_out
from rhino_jax.pipeline.cut.choose import cut
from rhino_jax.pipeline.cut.ops import IN_FLIGHT
from rhino_jax.pipeline.of_plan import FORWARD_ONLY
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
from rhino_jax.transform.staged.apart import Apart, take_apart
from rhino_jax.transform.staged.sides import Sides, sides_of
from rhino_jax.transform.staged.staging import staged


MOST_OPS_OF_BEST = 1500
"""Forward ops of programs whose cut CP-SAT looks at; of more, orders are cut."""


def plan_stages(
    search: Search, stages: int, microbatches: int | str, schedule: str
) -> Plan:
    """The plan of a step in so many stages.

    Args:
      search: of the step as its user wrote it.
      stages: how many groups of devices.
      microbatches: how many; "auto": about four for every stage.
      schedule: name of a family, or "auto".
    Raises:
      StageError, MicrobatchError, InfeasiblePlanError, ScheduleError.
    """
    started = time.monotonic()
    traced = search.running
    (mesh_axes, *_) = search.meshes
    devices = math.prod(size for _, size in mesh_axes)
    apart = _apart(search, stages, microbatches, devices // stages)
    sides = sides_of(apart)
    if not sides.backward:
        schedule = FORWARD_ONLY
    elif schedule == AUTO:
        schedule = "1f1b"
    mesh_axes, seconds = _on_a_group(search, sides)
    link = lay_out(search.target, mesh_axes).axes[_at(mesh_axes)]
    hop = link.bytes_per_s, link.alpha_s
    problem = problem_of(
        sides,
        seconds,
        stages,
        devices // stages,
        apart.cut.count,
        hop,
        search.request.memory_budget_bytes,
    )
    level = search.request.level if len(sides.forward) <= MOST_OPS_OF_BEST else "fast"
    chosen = cut(problem, level, seed=search.request.seed)
    step = staged(apart, chosen.stages)
    flights = IN_FLIGHT.get(schedule, IN_FLIGHT["1f1b"])
    in_flight = flights(stages, apart.cut.count)
    groups = plan_groups(search, step, traced.program, _own(mesh_axes), in_flight)
    pipeline = Pipeline(
        micro_batches=apart.cut.count,
        schedule=schedule,
        runs=runs_of(chosen.stages),
        costs=tuple(stage_cost(step, g) for g in groups),
        hops=hops_of(step, groups, *hop),
    )
    return assembled(search, step, groups, pipeline, mesh_axes, started)


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


def _at(axes: Sequence[tuple[str, int]]) -> int:
    return [name for name, _ in axes].index(STAGE_AXIS)


def _apart(search: Search, stages: int, microbatches: int | str, devices: int) -> Apart:
    traced = search.running
    if isinstance(microbatches, int):
        return take_apart(traced.closed_jaxpr, traced.program, microbatches)
    rows = take_apart(traced.closed_jaxpr, traced.program, 2).cut.rows
    counts = [n for n in range(2, rows + 1) if rows % n == 0]
    # Pieces that every device of a group has rows of, where there are such.
    even = [n for n in counts if (rows // n) % devices == 0] or counts
    count = min(even, key=lambda n: (abs(math.log(n / (4 * stages))), n))
    return take_apart(traced.closed_jaxpr, traced.program, count)
