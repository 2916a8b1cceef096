"""Pipelines that really run, in separate processes, compared with the simulator."""

from __future__ import annotations

import os
import socket
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

import rhino_jax as rhino
from rhino_jax.bench.checks import BenchError
from rhino_jax.bench.methods import SCHEDULES
from rhino_jax.bench.planning import trace_workload
from rhino_jax.bench.process import answers
from rhino_jax.bench.rows.row_run import Found, RowKind, TableLines
from rhino_jax.bench.suite import BenchRow
from rhino_jax.bench.tables.figures import format_ms, format_span
from rhino_jax.bench.timing import fed_back, mean_s
from rhino_jax.passes.staged.step import TaskKind
from rhino_jax.pipeline.of_plan import schedule_of
from rhino_jax.pipeline.simulator import simulate
from rhino_jax.plan.files.store import load_plan
from rhino_jax.plan.stages import Pipeline
from rhino_jax.runtime.bound import Bound
from rhino_jax.runtime.tasks.executable import TaskExecutable


STEPS = 15
"""Number of timed steps, task by task and as a whole; medians are used."""

WARM_UP = 2
"""Number of warm-up steps; the first one compiles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Measurements of one schedule of a row.

    Attributes:
      schedule: its name.
      task_s: median seconds of a task of micro-batches.
      apart_s, apart_simulated_s: seconds of a step, with stages in processes that have
        a core each: measured, and simulated from the measured seconds of every task.
      apart_hosted_s: simulated from these and from the host overhead of the processes:
        the core's seconds of a step outside of tasks, distributed over the tasks.
      host_s: host overhead of one task, in the process with the larger one.
      together_s, together_simulated_s: seconds of a step in one process, whose stages
        share XLA:CPU's threads: measured, and simulated.
    """

    schedule: str
    task_s: float
    apart_s: float
    apart_simulated_s: float
    apart_hosted_s: float
    host_s: float
    together_s: float
    together_simulated_s: float

    @property
    def apart_ratio(self) -> float:
        """Simulated over measured, in separate processes."""
        return self.apart_simulated_s / self.apart_s

    @property
    def hosted_ratio(self) -> float:
        """Simulated with host overhead over measured, in separate processes."""
        return self.apart_hosted_s / self.apart_s

    @property
    def together_ratio(self) -> float:
        """Simulated over measured, in one process."""
        return self.together_simulated_s / self.together_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Piped:
    """Measurements of one row.

    Attributes:
      one_device_s: seconds of the same step on one device that has one core, in as many
        micro-batches.
      cases: measurements of every schedule.
    """

    one_device_s: float
    cases: tuple[Case, ...]


def run_stages(row: BenchRow) -> Piped:
    """Run every schedule of a row.

    Args:
      row: a row whose target has a device for each stage.

    Raises:
      BenchError: a method is not a schedule; there are fewer cores than stages; a
        process failed.
    """
    count = row.num_devices
    _check(row, count)
    with tempfile.TemporaryDirectory() as folder:
        job = {"row": row, "devices": count, "plan": f"{folder}/plan"}
        (one,) = _together(job | {"schedule": ""}, 1)
        cases = tuple(_case(job, method.plan, count) for method in row.methods)
    return Piped(one_device_s=one["step_s"], cases=cases)


def _check(row: BenchRow, count: int) -> None:
    others = [m.name for m in row.methods if m.plan not in SCHEDULES]
    cores = len(os.sched_getaffinity(0))
    if others or cores < count or not row.microbatches:
        raise BenchError(
            f"`{row.workload}` on {row.target} cannot run as a pipeline whose stages"
            " have a core each.",
            numbers=f"stages: {count}, cores: {cores}, micro-batches:"
            f" {row.microbatches}, methods: {', '.join(m.name for m in row.methods)}",
            fix=f"methods = [{', '.join(map(repr, SCHEDULES))}], `microbatches`, and a"
            " target of as many devices as there are cores.",
        )


def _case(job: Mapping[str, Any], schedule: str, count: int) -> Case:
    job = {**job, "schedule": schedule}
    apart_s, pipeline, tasks, core_s = _measured(job, count)
    host_s = host_seconds(pipeline, tasks, core_s)
    together_s, shared, *_ = _measured(job, 0)
    return Case(
        schedule=schedule,
        task_s=statistics.median(
            s for kind, _, _, s in tasks if kind in _PER_MICRO_BATCH
        ),
        apart_s=apart_s,
        apart_simulated_s=_simulated_s(pipeline),
        apart_hosted_s=_simulated_s(with_host(pipeline, host_s)),
        host_s=max(host_s),
        together_s=together_s,
        together_simulated_s=_simulated_s(shared),
    )


def _measured(
    job: Mapping[str, Any], count: int
) -> tuple[float, Pipeline, list[Any], list[float]]:
    """Run a job; return the seconds of a step, the pipeline with measured seconds, its
    tasks, and seconds of every core in a step."""
    found = _together(job, count)
    plan = load_plan(job["plan"])
    assert plan.pipeline is not None
    tasks = [task for one in found for task in one["tasks"]]
    step_s = max(one["step_s"] for one in found)
    core_s = [one["core_s"] for one in found]
    return step_s, measured_pipeline(plan.pipeline, tasks), tasks, core_s


def _simulated_s(pipeline: Pipeline) -> float:
    return simulate(schedule_of(pipeline)).step_time_s


_PER_MICRO_BATCH = {
    TaskKind.FORWARD.name: "forward_s",
    TaskKind.BACKWARD.name: "backward_s",
    TaskKind.WEIGHT_GRADIENT.name: "weights_s",
}


def measured_pipeline(pipeline: Pipeline, tasks: Sequence[Any]) -> Pipeline:
    """Return a plan's pipeline, with measured seconds of its tasks.

    Args:
      pipeline: the plan's pipeline.
      tasks: (kind, submesh, place, seconds).
    """
    groups, names = pipeline.groups, (*_PER_MICRO_BATCH.values(), "update_s")
    between: dict[int, float] = defaultdict(float)
    costs: dict[tuple[int, str], Any] = defaultdict(float)
    for kind, group, place, s in tasks:
        if kind == TaskKind.BETWEEN.name:
            between[group] += s
        elif kind in _PER_MICRO_BATCH:
            costs[place, _PER_MICRO_BATCH[kind]] += s
        else:
            costs[groups.index(group), "update_s"] += s
    return replace(
        pipeline,
        costs=tuple(
            replace(cost, **{name: costs[i, name] for name in names})
            for i, cost in enumerate(pipeline.costs)
        ),
        between=tuple(
            replace(one, seconds=between[i]) for i, one in enumerate(pipeline.between)
        ),
    )


def host_seconds(
    pipeline: Pipeline, tasks: Sequence[Any], core_s: Sequence[float]
) -> list[float]:
    """Return each submesh's host overhead per micro-batch task, in seconds.

    It dispatches, serializes and sends.

    Args:
      pipeline: the plan's pipeline.
      tasks: as in `measured_pipeline`.
      core_s: for every submesh, seconds of its only core in a step.
    """
    spent, count = [0.0] * len(core_s), [0] * len(core_s)
    for kind, group, _, s in tasks:
        is_per_micro_batch = kind in _PER_MICRO_BATCH
        spent[group] += s * (pipeline.micro_batches if is_per_micro_batch else 1)
        count[group] += pipeline.micro_batches * is_per_micro_batch
    return [
        max(0.0, all_s - tasks_s) / n
        for all_s, tasks_s, n in zip(core_s, spent, count, strict=True)
    ]


def with_host(pipeline: Pipeline, host_s: Sequence[float]) -> Pipeline:
    """Return a pipeline with host overhead added to its tasks."""
    costs = [
        replace(
            cost,
            **{
                name: getattr(cost, name) + host_s[group]
                for name in _PER_MICRO_BATCH.values()
                if getattr(cost, name)
            },
        )
        for cost, group in zip(pipeline.costs, pipeline.groups, strict=True)
    ]
    return replace(pipeline, costs=tuple(costs))


def _together(job: Mapping[str, Any], count: int) -> list[Mapping[str, Any]]:
    """Run a job in several processes and return their measurements.

    Args:
      job: the job.
      count: number of processes; 0: one, with all devices.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return answers(
        f"{__name__}:run_process",
        [(job, i, count, port) for i in range(max(1, count))],
        f"a process of the schedule {job['schedule']!r} failed.",
    )


def run_process(task: tuple[Mapping[str, Any], int, int, int]) -> dict[str, Any]:
    """Run a job, and return its measurements; runs in a worker.

    Args:
      task: the job; number of this process; number of processes, each with one core
        and one device, or 0: this one alone, with all cores and devices; port of the
        coordinator, if there are several.
    """
    job, index, count, port = task
    if count:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[index % len(cores)]})
    devices = 1 if count else job["devices"]
    jax.config.update("jax_num_cpu_devices", devices)
    if count > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{port}", count, index)
    return _run(job)


def _run(job: Mapping[str, Any]) -> dict[str, Any]:
    row: BenchRow = job["row"]
    workload, devices = row.make(), jax.devices()
    is_staged = job["schedule"] != ""
    plan = rhino.plan(
        workload.step,
        *workload.abstract_args(),
        mesh=jax.make_mesh(
            (len(devices),), ("stage" if is_staged else "data",), devices=devices
        ),
        hardware="cpu",
        stages=len(devices) if is_staged else 1,
        schedule=job["schedule"] or "auto",
        microbatches=row.microbatches,
        donate_argnums=workload.donate_argnums,
        progress=False,
    )
    bound = Bound(plan.traced or trace_workload(workload), plan, plan.mesh)
    args = plan.put(jax.device_get(workload.make_args(jax.random.key(0))))

    def run(*args: Any) -> Any:
        arguments = bound.read(args, {})
        assert arguments is not None
        return bound.run(arguments)

    step = fed_back(run, workload, args)
    for _ in range(WARM_UP):
        mean_s(step)
    core_s = time.process_time()
    seconds = [mean_s(step) for _ in range(STEPS)]
    core_s = (time.process_time() - core_s) / STEPS
    found: dict[str, Any] = {
        "step_s": statistics.median(seconds),
        "core_s": core_s,
        "tasks": [],
    }
    if is_staged:
        assert isinstance(bound.executable, TaskExecutable)
        if jax.process_index() == 0:
            plan.save(job["plan"])
        found["tasks"] = _tasks(bound.executable, step)
    return found


def _tasks(executable: TaskExecutable, step: Callable[[], Any]) -> list[Any]:
    """Return (kind, submesh, place, median seconds) of the tasks that run here.

    Each task is waited for, before and after.
    """
    samples: dict[tuple[str, int, int], list[float]] = defaultdict(list)

    def timed(run: Callable[..., Any], key: tuple[str, int, int]) -> Callable[..., Any]:
        def call(*arrays: Any) -> Any:
            jax.block_until_ready(arrays)
            started = time.perf_counter()
            results = jax.block_until_ready(run(*arrays))
            samples[key].append(time.perf_counter() - started)
            return results

        return call

    for programs in executable.programs:
        assert isinstance(programs.all, list)
        for i, task in enumerate(programs.of.tasks):
            key = task.kind.name, task.group, task.place
            programs.all[i] = timed(programs.all[i], key)
    for _ in range(STEPS):
        mean_s(step)
    return [[*key, statistics.median(x)] for key, x in samples.items()]


def _line(found: Piped) -> str:
    parts = [
        f"{c.schedule} {c.apart_ratio:.2f} ({c.hosted_ratio:.2f})" for c in found.cases
    ]
    return f"simulated ÷ measured (with the host's work): {', '.join(parts)}"


def _table_lines(row: BenchRow, found: Piped) -> TableLines:
    for case in found.cases:
        yield {
            "schedule": case.schedule,
            "ms a task": format_ms(case.task_s),
            "host ms a task": format_ms(case.host_s),
            "ms": format_ms(case.apart_s),
            "simulated ÷ measured": f"{case.apart_ratio:.2f}",
            "with the host's work": f"{case.hosted_ratio:.2f}",
            "one device ÷ this": f"{found.one_device_s / case.apart_s:.2f}",
            "one process ms": format_ms(case.together_s),
            "simulated ÷ measured there": f"{case.together_ratio:.2f}",
        }


def _summary(suite: str, found: Found[Piped]) -> tuple[str, ...]:
    """Return a line on the simulator's accuracy and the speed-up over one device."""
    cases = [case for _, x in found for case in x.cases]
    faster = [x.one_device_s / c.apart_s for _, x in found for c in x.cases]
    return (
        f"`{suite}`, {len(cases)} pipelines that really run, simulated over measured:"
        f" {format_span([c.apart_ratio for c in cases])} in processes of their own,"
        f" {format_span([c.hosted_ratio for c in cases])} with what their cores do"
        f" beside tasks, {format_span([c.together_ratio for c in cases])} in one"
        f" process; one device over the pipeline's: {format_span(faster)}.",
    )


STAGES: RowKind[Piped] = RowKind(
    name="stages",
    sample=Piped,
    measure=run_stages,
    describe=_line,
    table=_table_lines,
    notes="Stages in processes that have a core each, one device in each; then in one"
    " process, where they share XLA:CPU's threads. Simulated: with the median of what"
    " each task took when it was waited for, before and after; links as the hardware"
    " file has them. With the host's work: tasks last longer by the seconds of the core"
    " that a step takes beyond them, since a process that dispatches and sends has no"
    " other core. One device has one core, and as many micro-batches.",
    summary=_summary,
)
