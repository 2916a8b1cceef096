"""The pipeline of a plan: its costs, its schedule, and its simulated step; orders of
tasks as text, so that plans store searched schedules."""

from __future__ import annotations

import math
from dataclasses import replace

from rhino_jax.errors import ScheduleError
from rhino_jax.pipeline.graph import graph_of
from rhino_jax.pipeline.jitter import Jittered, Noise, jittered
from rhino_jax.pipeline.offload import with_offload
from rhino_jax.pipeline.schedules.searched import make
from rhino_jax.pipeline.simulation import Simulation
from rhino_jax.pipeline.simulator import checked, simulate
from rhino_jax.pipeline.tasks import LETTERS, Schedule, TaskGraph
from rhino_jax.pipeline.ticks import in_ticks
from rhino_jax.pipeline.work import StepWork, work_of
from rhino_jax.plan.plan import PlanData
from rhino_jax.plan.stages import Pipeline
from rhino_jax.utils.keywords import brief, real


_KINDS = {letter: kind for kind, letter in LETTERS.items()}


def written_orders(schedule: Schedule) -> tuple[str, ...]:
    """Return each group's tasks: letter, chunk, micro-batch, as `F0.2 B1.0 U0.0`."""
    words = [
        f"{LETTERS[t.kind]}{t.chunk}.{t.micro_batch}" for t in schedule.graph.tasks
    ]
    return tuple(" ".join(words[i] for i in order) for order in schedule.orders)


def read_order(graph: TaskGraph, text: str) -> tuple[int, ...]:
    """Parse a group's text of `written_orders` to positions in a graph."""

    def position(word: str) -> int:
        chunk, batch = map(int, word[1:].split("."))
        return graph.find(_KINDS[word[0]], chunk, batch)

    return tuple(map(position, text.split()))


def schedule_of(pipeline: Pipeline, work: StepWork | None = None) -> Schedule:
    """Return the schedule of a plan's stages.

    Args:
      pipeline: pipeline of a plan.
      work: costs of stages that run as tasks; None: those of the plan.
    """
    if pipeline.passes:
        return checked(in_ticks(pipeline))
    work = work or work_of(pipeline)
    if not pipeline.orders:
        found = make(pipeline.schedule, work)
        if not pipeline.is_offloaded:
            return found
        sizes = [cost.offloaded_bytes for cost in pipeline.costs]
        return with_offload(found, sizes, pipeline.host_bytes_per_s)
    graph = graph_of(work, is_split=pipeline.is_split)
    orders = tuple(read_order(graph, text) for text in pipeline.orders)
    return checked(Schedule(pipeline.schedule, graph, orders))


def simulated(
    plan: PlanData, jitter: Noise | float | None = None
) -> Simulation | Jittered:
    """Simulate one step of a plan, or many with noise.

    Args:
      plan: a plan with several stages.
      jitter: None: no noise. A number: standard deviation of the logarithm of every
        task's duration, twice that for transfers. Or a
        `rhino_jax.pipeline.jitter.Noise`.
    Raises:
      ScheduleError: the plan has one stage, or `jitter` is invalid.
    """
    if plan.pipeline is None:
        raise ScheduleError(
            f"the plan of `{plan.program_name}` has one stage: there is nothing to"
            " simulate.",
            where="`plan.simulate`",
            numbers="stages: 1",
            fix="plan with `stages=2` or more.",
        )
    schedule = schedule_of(plan.pipeline)
    if jitter is None:
        return simulate(schedule)
    if not isinstance(jitter, Noise):
        sigma = real(jitter)
        if sigma is None or not 0 <= sigma < math.inf:
            raise ScheduleError(
                "`plan.simulate`: jitter must be a finite number, 0 or more, or a"
                " `Noise`.",
                where="jitter=",
                numbers=f"got {brief(jitter)} ({type(jitter).__name__})",
                fix="write jitter=0.05 for tasks that take some 5 % more or less.",
            )
        jitter = Noise(task_sigma=sigma, link_sigma=2 * sigma)
    return jittered(schedule, jitter)


IDLE = 0.1
"""Share of the busiest stage's busy time below which notes call a stage idle."""


def idle_stages(pipeline: Pipeline) -> list[int]:
    """Return the stages that have almost no work."""
    busy = pipeline.busy_s
    return [i for i, seconds in enumerate(busy) if seconds < IDLE * max(busy)]


def link_wait_s(pipeline: Pipeline, simulation: Simulation) -> float:
    """Return the seconds that transfers between stages add to a step.

    0.0 if they are less than half of the time in which stages idle.

    Args:
      pipeline: pipeline of a plan.
      simulation: simulation of its step.
    """
    hops = (replace(h, bytes_per_s=math.inf, latency_s=0.0) for h in pipeline.hops)
    free = simulate(schedule_of(replace(pipeline, hops=tuple(hops))))
    waits_s = simulation.step_time_s - free.step_time_s
    return waits_s if waits_s >= simulation.bubble * simulation.step_time_s / 2 else 0.0
