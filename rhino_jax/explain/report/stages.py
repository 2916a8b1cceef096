"""Sections on the stages of a plan, and a step of its pipeline as a timeline.

The timeline has the tasks of every stage over time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rhino_jax.explain.report.line import format_mesh
from rhino_jax.explain.report.section import Section, Table
from rhino_jax.explain.report.views.boxes import HUES, box, colour, legend, row
from rhino_jax.pipeline.of_plan import link_wait_s, schedule_of
from rhino_jax.pipeline.simulation import Simulation, lines_of
from rhino_jax.pipeline.simulator import simulate
from rhino_jax.pipeline.tasks import TaskKind, label
from rhino_jax.units import format_bytes, format_count, format_seconds, format_share


if TYPE_CHECKING:
    from rhino_jax.plan.plan import PlanData
    from rhino_jax.plan.stages import Pipeline, StageCost, StagePlan


MAX_TASKS = 2000
"""Maximum number of tasks drawn, each some 300 bytes: larger pages are slow to open."""

COLOURS: dict[str, tuple[str, tuple[TaskKind, ...]]] = {
    "forward": (colour(HUES[0], 0.55), (TaskKind.FORWARD,)),
    "backward": (colour(HUES[1], 0.5), (TaskKind.BACKWARD, TaskKind.INPUT_GRADIENT)),
    "gradients of weights": (colour(HUES[4], 0.5), (TaskKind.WEIGHT_GRADIENT,)),
    "whole batch": (colour(HUES[3], 0.4), (TaskKind.BETWEEN,)),
    "update": (colour(HUES[2], 0.5), (TaskKind.UPDATE,)),
}
"""Legend entry → colour, and the pass kinds that it stands for."""


def timeline(times: Simulation) -> str:
    """Draw a track of tasks for every stage; empty above `MAX_TASKS` tasks."""
    graph = times.schedule.graph
    if not times.step_time_s or len(graph.tasks) > MAX_TASKS:
        return ""
    background = {k: paint for paint, kinds in COLOURS.values() for k in kinds}
    to_percent = 100 / times.step_time_s
    lines, seen = [], set[TaskKind]()
    for group, order in enumerate(times.schedule.orders):
        boxes = []
        for i in order:
            task = graph.tasks[i]
            start, seconds = times.task_start_s[i], times.task_end_s[i]
            seconds = seconds - start
            if not seconds:
                continue
            seen.add(task.kind)
            boxes.append(
                box(
                    float(start) * to_percent,
                    float(seconds) * to_percent,
                    background[task.kind],
                    title=f"{label(task)}: {task.kind}, {format_seconds(seconds)}",
                    label=label(task),
                )
            )
        lines.append(row(f"stage {group}", boxes))
    keys = [
        (paint, words) for words, (paint, kinds) in COLOURS.items() if seen & {*kinds}
    ]
    return f'<div class="timeline">{"".join(lines)}{legend(keys)}</div>'


TIMELINE_WIDTH = 88

SENDS = "sends a step"


def stage_sections(plan: PlanData) -> tuple[Section, ...]:
    """Return the sections on stages and schedule; empty for a single stage."""
    if len(plan.stages) == 1:
        return ()
    if plan.pipeline is None:
        return (Section("stages", table=_table(plan)),)
    pipeline, simulation = plan.pipeline, simulate(schedule_of(plan.pipeline))
    return (
        Section("stages", table=_costs(plan, pipeline, simulation)),
        Section(
            "one step",
            facts=(
                (
                    "schedule",
                    f"{pipeline.schedule}, {format_count(pipeline.micro_batches)}"
                    f" micro-batch{'' if pipeline.micro_batches == 1 else 'es'}",
                ),
                *_slices(pipeline),
                ("bubble", f"{format_share(simulation.bubble)} of all devices' time"),
                *_links(pipeline, simulation),
            ),
            table=Table(
                (
                    "stage",
                    "forward F, backward B (of inputs I, of weights W), update U"
                    f"{', of the whole batch M' if pipeline.between else ''}; idle ·",
                ),
                tuple(
                    (str(g), line.replace(" ", "·"))
                    for g, line in enumerate(lines_of(simulation, TIMELINE_WIDTH))
                ),
                "><",
                (1,),
            ),
            drawing=timeline(simulation),
            draws_table=True,
        ),
    )


def _links(pipeline: Pipeline, simulation: Simulation) -> Iterator[tuple[str, str]]:
    """Yield the fact on waits for links, if these are most of the bubble."""
    waits_s = link_wait_s(pipeline, simulation)
    if waits_s:
        rate = format_bytes(min(hop.bytes_per_s for hop in pipeline.hops))
        yield (
            "waits for links",
            f"{format_seconds(waits_s)} of a step, most of the bubble: {rate}/s from a"
            " device to the next stage. More micro-batches, another schedule or faster"
            " links for the axis `stage` hide more.",
        )


def _slices(pipeline: Pipeline) -> Iterator[tuple[str, str]]:
    if pipeline.slices:
        lengths = " + ".join(map(format_count, pipeline.slices))
        yield "sequences in slices", f"of {lengths} tokens"


def _costs(plan: PlanData, pipeline: Pipeline, simulation: Simulation) -> Table:
    peaks = simulation.group_peak_bytes
    costs: list[list[StageCost]] = [[] for _ in plan.stages]
    for group, cost in zip(pipeline.groups, pipeline.costs, strict=True):
        costs[group].append(cost)
    in_ticks = bool(pipeline.passes)
    between = [[format_seconds(one.seconds)] for one in pipeline.between]
    rows = tuple(
        (
            str(i),
            format_mesh(stage.mesh_axes),
            *([_layers(stage), format_bytes(costs[i][0].fixed_bytes)] * in_ticks),
            format_seconds(sum(c.forward_s for c in costs[i])),
            *(between[i] if between else ()),
            format_seconds(sum(c.whole_backward_s for c in costs[i])),
            format_seconds(sum(c.update_s for c in costs[i])),
            format_bytes(peaks[i]),
            _sends(stage),
        )
        for i, stage in enumerate(plan.stages)
    )
    met = ("whole batch",) if between else ()
    passes = ("forward", *met, "backward", "update")
    held = ("layers", "arguments") if in_ticks else ()
    header = ("stage", "mesh", *held, *passes, "peak", SENDS)
    aligned, wraps = f"><{'>' * len(header[2:-1])}<", (len(header) - 1, 1)
    stages = range(len(plan.stages))
    more = {
        "recomputed in backward": [_again(pipeline, stage) for stage in stages],
        "waits on the host": [_on_host(pipeline, stage) for stage in stages],
    }
    more = {name: cells for name, cells in more.items() if any(cells)}
    wider = tuple(
        (*row, *cells) for row, *cells in zip(rows, *more.values(), strict=True)
    )
    return Table((*header, *more), wider, aligned + "<" * len(more), wraps)


def _layers(stage: StagePlan) -> str:
    """Format a stage's layers as "2 to 3", one range per depth of stacks."""
    return ", ".join(f"{a} to {b - 1}" for a, b in stage.layers)


def _again(pipeline: Pipeline, stage: int) -> str:
    """Say which part of a stage's forward pass is recomputed in its backward pass.

    Returns:
      "forward pass", or the number of recomputed values with their bytes and seconds;
      empty if nothing is.
    """
    own = [c for c, at in enumerate(pipeline.groups) if at == stage]
    if set(own) <= set(pipeline.recomputed):
        return "forward pass"
    made = pipeline.remat[stage] if pipeline.remat else None
    if made is None or not made.count:
        return ""
    values = "1 value" if made.count == 1 else f"{made.count} values"
    sign = "−" if made.added_s < 0 else "+"
    seconds = format_seconds(abs(made.added_s))
    return f"{values}: −{format_bytes(made.saved_bytes)}, {sign}{seconds}"


def _on_host(pipeline: Pipeline, stage: int) -> str:
    """Say how many bytes a backward pass reads from the host; empty if none."""
    own = [c for c, at in enumerate(pipeline.groups) if at == stage]
    size = sum(pipeline.costs[c].offloaded_bytes for c in own)
    if not size:
        return ""
    seconds = format_seconds(size / pipeline.host_bytes_per_s)
    return f"{format_bytes(size)} a micro-batch, {seconds} each way"


def _sends(stage: StagePlan) -> str:
    """Format the bytes that a stage's devices send to each other stage in a step."""
    to: dict[int, int] = {}
    for send in stage.sends:
        to[send.to] = to.get(send.to, 0) + send.bytes
    return ", ".join(f"{format_bytes(size)} to {i}" for i, size in sorted(to.items()))


def _table(plan: PlanData) -> Table:
    rows = tuple(
        (
            str(i),
            format_mesh(stage.mesh_axes),
            format_seconds(stage.compute_s),
            format_bytes(stage.peak_bytes),
            ", ".join(f"{format_bytes(s.bytes)} to {s.to}" for s in stage.sends),
        )
        for i, stage in enumerate(plan.stages)
    )
    header = ("stage", "mesh", "compute", "peak", "sends per step")
    return Table(header, rows, "><>><", (4, 1))
