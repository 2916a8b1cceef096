"""One process of a pipeline whose steps are timed."""

from __future__ import annotations

import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

import rhino_jax as rhino
from rhino_jax.bench.planning import trace_workload, workload_of
from rhino_jax.bench.suite import BenchRow
from rhino_jax.runtime.bound import Bound
from rhino_jax.runtime.tasks.executable import TaskExecutable


STEPS = 15
"""Number of timed steps, task by task and as a whole; medians are used."""

WARM = 2
"""Number of warm-up steps; the first one compiles."""


def measure(task: tuple[Mapping[str, Any], int, int, int]) -> dict[str, Any]:
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
    return _measured(job)


def _measured(job: Mapping[str, Any]) -> dict[str, Any]:
    row: BenchRow = job["row"]
    workload, devices = workload_of(row), jax.devices()
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
    args = list(plan.put(jax.device_get(workload.make_args(jax.random.key(0)))))

    def step() -> None:
        arguments = bound.read(tuple(args), {})
        assert arguments is not None
        result = bound.run(arguments)
        for i in workload.donate_argnums:
            args[i] = result[i]
        jax.block_until_ready(result)

    _seconds(step, WARM)
    core_s = time.process_time()
    seconds = _seconds(step, STEPS)
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


def _seconds(step: Callable[[], None], count: int) -> list[float]:
    found = []
    for _ in range(count):
        started = time.perf_counter()
        step()
        found.append(time.perf_counter() - started)
    return found


def _tasks(executable: TaskExecutable, step: Callable[[], None]) -> list[Any]:
    """Return (kind, submesh, place, median seconds) of the tasks that run here.

    Each task is waited for, before and after.
    """
    samples: dict[tuple[str, int, int], list[float]] = defaultdict(list)

    def timed(run: Callable[..., Any], key: tuple[str, int, int]) -> Callable[..., Any]:
        def call(*arrays: Any) -> Sequence[Any]:
            jax.block_until_ready(arrays)
            started = time.perf_counter()
            results: Sequence[Any] = run(*arrays)
            jax.block_until_ready(results)
            samples[key].append(time.perf_counter() - started)
            return results

        return call

    for programs in executable.programs:
        assert isinstance(programs.all, list)
        for i, task in enumerate(programs.of.tasks):
            key = task.kind.name, task.group, task.place
            programs.all[i] = timed(programs.all[i], key)
    _seconds(step, STEPS)
    return [[*key, statistics.median(x)] for key, x in samples.items()]
