"""Compile the tasks of a plan of several stages, one by one.

`CompiledPlan` is the compiled form of any plan, of one program or of several tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from rhino_jax.passes.staged.holding import TaskResiduals, earlier_results, is_once
from rhino_jax.passes.staged.step import StagedTask, TaskKind, ValueKey
from rhino_jax.pipeline.of_plan import schedule_of
from rhino_jax.pipeline.simulation import Simulation
from rhino_jax.pipeline.simulator import simulate
from rhino_jax.plan.plan import PlanData
from rhino_jax.plan.records import Predicted, WhileLoop
from rhino_jax.plan.stages import Between, Pipeline, StageCost
from rhino_jax.runtime.bound import Bound
from rhino_jax.runtime.tasks.executable import TaskExecutable
from rhino_jax.runtime.tasks.programs import GroupPrograms
from rhino_jax.verify.hlo.reading import read_compiled
from rhino_jax.verify.hlo.records import (
    CompiledCollective,
    CompiledKernel,
    CompiledStep,
    Reading,
)
from rhino_jax.verify.matching.ledger import Evidence
from rhino_jax.verify.places import CompilePlace


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledPlan(CompiledStep):
    """The compiled program or tasks of a plan.

    Attributes:
      stage_peak_bytes: peak memory of each stage, bytes per device, with compiled tasks
        or in one SPMD program; empty where there is one stage.
      evidence: evidence on the causes of differences; None for several tasks.
      stages: (planned, compiled) cost of each chunk of a pipeline; the residuals
        between tasks are as planned in both.
      between: (planned, compiled) seconds of each chunk for the task that its group
        runs once a step between forward and backward; 0 but for a group's first chunk,
        and empty where micro-batches are not coupled.
    """

    stage_peak_bytes: tuple[int, ...] = ()
    evidence: Evidence | None = None
    stages: tuple[tuple[StageCost, StageCost], ...] = ()
    between: tuple[tuple[float, float], ...] = ()


def compiled_stages(bound: Bound[Any], place: CompilePlace) -> CompiledPlan:
    """Compile every task for its stage's submesh, and simulate a step with their costs.

    Args:
      bound: the function with its plan, on a mesh of real or compile-only devices.
      place: the mesh and the hardware to compile for.
    """
    executable, plan = bound.executable, bound.plan
    assert isinstance(executable, TaskExecutable) and plan.pipeline is not None
    found = [
        _compiled(programs, i, task, place, plan.while_loops)
        for programs in executable.programs
        for i, task in enumerate(programs.of.tasks)
    ]
    readings = [c.reading for c in found]
    lacking = [r.out_of_memory for r in readings if r.out_of_memory is not None]
    group_of = plan.pipeline.groups
    costs = tuple(
        _cost(cost, [c for c in found if _is_of(c.task, chunk, group_of)])
        for chunk, cost in enumerate(plan.pipeline.costs)
    )
    between = _between(plan.pipeline.between, found)
    pipeline = replace(plan.pipeline, costs=costs, between=between)
    compiled = simulate(schedule_of(pipeline))
    return CompiledPlan(
        platform=readings[0].platform,
        compiled=None if lacking else _predicted(plan, compiled, found),
        stage_peak_bytes=compiled.group_peak_bytes,
        collectives=tuple(
            _times(c, plan.microbatches if x.task.is_per_micro_batch else 1)
            for x in found
            for c in x.reading.collectives
        ),
        out_of_memory=lacking[0] if lacking else None,
        rematerialised=tuple(line for r in readings for line in r.rematerialised),
        repeated_sums=tuple(x for r in readings for x in r.repeated_sums),
        kernels=tuple(_kernels(plan, found)),
        stages=tuple(zip(plan.pipeline.costs, costs, strict=True)),
        between=_by_chunk(plan.pipeline, between),
        seconds=sum(r.seconds for r in readings),
    )


def _kernels(plan: PlanData, found: Iterable[_Compiled]) -> Iterator[CompiledKernel]:
    """Yield the kernels of all tasks, as the mean over devices."""
    for c in found:
        runs = plan.microbatches if c.task.is_per_micro_batch else 1
        share = len(plan.stages[c.task.group].devices) / plan.num_devices
        yield from (kernel.scaled(runs * share) for kernel in c.reading.kernels)


def _is_of(task: StagedTask, chunk: int, group_of: Sequence[int]) -> bool:
    """Whether a task belongs to a chunk.

    Tasks that run once a step belong to the first chunk of their group.
    """
    if task.is_per_micro_batch:
        return task.place == chunk
    return group_of.index(task.group) == chunk


@dataclass(frozen=True, slots=True)
class _Compiled:
    """One compiled task.

    Attributes:
      task: the task.
      reading: cost and collectives of one run.
      working_bytes: working memory of the task, bytes per device; see `own_bytes`.
    """

    task: StagedTask
    reading: Reading
    working_bytes: int


def _compiled(
    programs: GroupPrograms,
    position: int,
    task: StagedTask,
    place: CompilePlace,
    while_loops: tuple[WhileLoop, ...],
) -> _Compiled:
    types = programs.step.types
    shapes = [
        jax.ShapeDtypeStruct(
            types[key].shape, types[key].dtype, sharding=programs.shardings[key]
        )
        for key in task.reads
    ]
    lowered = programs.all[position].lower(*shapes)
    compilation = place.compile(lowered, programs.mesh)
    axes = programs.stage.mesh_axes
    reading = read_compiled(compilation, axes, place.target, while_loops=while_loops)
    tile = place.target.device.tile
    # Results of earlier once-a-step tasks are live, though this task reads none.
    tasks = programs.of.tasks
    beside = [k for k in earlier_results(tasks, task) if k not in programs.in_place]
    peak_bytes = reading.compiled.peak_bytes + sum(
        programs.bytes(key, tile) for key in beside
    )
    holding = TaskResiduals.of(tasks, programs.step.received(task.group))
    working_bytes = own_bytes(
        peak_bytes, holding, task, lambda key: programs.bytes(key, tile)
    )
    return _Compiled(task, reading, working_bytes)


def own_bytes(
    peak_bytes: int,
    holding: TaskResiduals,
    task: StagedTask,
    size_of: Callable[[ValueKey], int],
) -> int:
    """Return a task's working memory beyond the residuals that its group holds anyway.

    Args:
      peak_bytes: peak memory of the compiled task: arguments, results that do not alias
        these, and temporaries.
      holding: residuals of the group's tasks.
      task: the task.
      size_of: bytes of a value on one device.
    """
    return max(peak_bytes - sum(map(size_of, holding.held(task))), 0)


def _cost(planned: StageCost, tasks: list[_Compiled]) -> StageCost:
    """Return a chunk's cost with its tasks as compiled and residuals as planned."""
    seconds: Mapping[TaskKind, float] = {
        kind: sum(c.reading.compiled.step_time_s for c in tasks if c.task.kind is kind)
        for kind in TaskKind
    }
    working = [c.working_bytes for c in tasks if not is_once(c.task)]
    once = [c.working_bytes for c in tasks if is_once(c.task)]
    return replace(
        planned,
        forward_s=seconds[TaskKind.FORWARD],
        backward_s=seconds[TaskKind.BACKWARD],
        weights_s=seconds[TaskKind.WEIGHT_GRADIENT],
        update_s=seconds[TaskKind.START] + seconds[TaskKind.UPDATE],
        working_bytes=max(working, default=0),
        update_bytes=max(once, default=0),
    )


def _between(
    planned: Sequence[Between], found: Sequence[_Compiled]
) -> tuple[Between, ...]:
    """Return the costs of the tasks between forward and backward, as compiled."""
    took = {c.task.group: c for c in found if c.task.kind is TaskKind.BETWEEN}
    return tuple(
        replace(one, seconds=took[g].reading.compiled.step_time_s if g in took else 0.0)
        for g, one in enumerate(planned)
    )


def _by_chunk(
    planned: Pipeline, compiled: Sequence[Between]
) -> tuple[tuple[float, float], ...]:
    """Return (planned, compiled) seconds between forward and backward for each chunk.

    They are attributed to the first chunk of each group; other chunks have 0.
    """
    if not compiled:
        return ()
    group_of = planned.groups
    return tuple(
        (planned.between[g].seconds, compiled[g].seconds)
        if group_of.index(g) == chunk
        else (0.0, 0.0)
        for chunk, g in enumerate(group_of)
    )


def _predicted(
    plan: PlanData, simulation: Simulation, found: list[_Compiled]
) -> Predicted:
    """Return the predicted cost of a step, simulated with compiled tasks."""
    compute, flops = [0.0] * len(plan.stages), [0.0] * len(plan.stages)
    for c in found:
        times = plan.microbatches if c.task.is_per_micro_batch else 1
        compute[c.task.group] += times * c.reading.compiled.compute_s
        flops[c.task.group] += times * c.reading.compiled.flops_per_device
    step_s = simulation.step_time_s
    return Predicted(
        step_time_s=step_s,
        compute_s=max(compute),
        communication_s=max(step_s - max(compute), 0.0),
        peak_bytes=simulation.peak_bytes,
        flops_per_device=max(flops),
    )


def _times(c: CompiledCollective, times: int) -> CompiledCollective:
    return replace(
        c, bytes=c.bytes * times, count=c.count * times, seconds=c.seconds * times
    )
