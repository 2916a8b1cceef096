"""The pipeline of a plan: its costs, its schedule, and its simulated step; orders of
tasks as text, so that plans store searched schedules.

The tasks of an SPMD pipeline are given tick by tick.
All devices run the same program: on every tick each runs its layers for its current
micro-batch, sends the result to the next stage, and waits until the transfer is
complete. A stage without a micro-batch computes on unused data; here it counts as idle.
Ops outside of the layers run on all stages at once: `between` before each pass, and the
update after the last.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from itertools import chain, count, product

from rhino_jax.errors import ScheduleError
from rhino_jax.pipeline.graph import graph_of
from rhino_jax.pipeline.jitter import Jittered, Noise, jittered
from rhino_jax.pipeline.offload import with_offload
from rhino_jax.pipeline.schedules.searched import make
from rhino_jax.pipeline.simulation import Simulation
from rhino_jax.pipeline.simulator import checked, simulate
from rhino_jax.pipeline.tasks import (
    LETTERS,
    Hold,
    Schedule,
    Task,
    TaskGraph,
    TaskKind,
    Transfer,
    TransferLink,
)
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


def in_ticks(pipeline: Pipeline) -> Schedule:
    """Return the schedule of an SPMD pipeline, which has only one order.

    The step takes `before_s` of each pass and m + S - 1 times its `tick_s` +
    `send_s`; then `update_s`.

    Args:
      pipeline: an SPMD pipeline.
    """
    passes, costs, m = pipeline.passes, pipeline.costs, pipeline.micro_batches
    # Backward passes run the layer loops of the forward passes, the last one first.
    ahead = sum(not one.is_backward for one in passes)
    forward, backward = count(), chain(reversed(range(ahead)), count(ahead))
    loops = [next(backward if one.is_backward else forward) for one in passes]
    # Each stage has a task before each pass, those of its ticks, and the update.
    size = len(passes) * (m + 1) + 1
    tasks: list[Task] = []

    def at(stage: int, number: int, micro_batch: int) -> int:
        return stage * size + number * (m + 1) + 1 + micro_batch

    for stage, cost in enumerate(costs):
        add = partial(Task, group=stage, working_bytes=cost.working_bytes)
        # All ticks' residuals are held until the last tick reads them.
        held = cost.activation_bytes * pipeline.ticks
        until = (at(stage, len(passes) - 1, m - 1),)
        holds = (Hold(held, until),) if held else ()
        sent_s, ends = 0.0, tuple[int, ...]()
        for number, one in enumerate(passes):
            tasks.append(
                add(
                    kind=TaskKind.BETWEEN,
                    chunk=stage,
                    slice=number,
                    seconds=one.before_s + sent_s,
                    holds=holds,
                    after=ends,
                )
            )
            kind = TaskKind.BACKWARD if one.is_backward else TaskKind.FORWARD
            chunk = loops[number] * len(costs) + stage
            tasks += (
                add(kind=kind, chunk=chunk, micro_batch=j, seconds=one.tick_s)
                for j in range(m)
            )
            # The last tick of a pass sends like all others, though nothing is read.
            sent_s, holds = one.send_s, ()
            ends = (at(0 if one.is_reversed else len(costs) - 1, number, m - 1),)
        seconds = cost.update_s + sent_s
        tasks.append(
            add(kind=TaskKind.UPDATE, chunk=stage, seconds=seconds, after=ends)
        )
    links: dict[tuple[int, int], int] = {}
    transfers = []
    for (number, one), j, stage in product(
        enumerate(passes), range(m), range(len(costs))
    ):
        to = stage + (-1 if one.is_reversed else 1)
        if 0 <= to < len(costs):
            # The stage itself waits before its next tick, too.
            targets = [at(to, number, j), at(stage, number, j + 1)]
            transfers.append(
                Transfer(
                    source=at(stage, number, j),
                    targets=tuple(targets if j + 1 < m else targets[:1]),
                    link=links.setdefault((stage, to), len(links)),
                    bytes=one.send_bytes,
                    seconds=one.send_s,
                )
            )
    graph = TaskGraph(
        groups=len(costs),
        tasks=tuple(tasks),
        transfers=tuple(transfers),
        links=tuple(TransferLink(f"{a} → {b}") for a, b in links),
        fixed_bytes=tuple(cost.fixed_bytes for cost in costs),
    )
    starts = range(0, len(tasks), size)
    orders = tuple(tuple(range(start, start + size)) for start in starts)
    return Schedule(pipeline.schedule, graph, orders)
