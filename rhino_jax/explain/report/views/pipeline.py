"""A step of a pipeline as a timeline: the tasks of every stage over time."""

from __future__ import annotations

from rhino_jax.explain.report.views.boxes import HUES, box, colour, legend, row
from rhino_jax.pipeline.tasks import PassKind, label
from rhino_jax.pipeline.times import Times
from rhino_jax.units import format_seconds


MAX_TASKS = 2000
"""Maximum number of tasks drawn, each some 300 bytes: larger pages are slow to open."""

COLOURS: dict[str, tuple[str, tuple[PassKind, ...]]] = {
    "forward": (
        colour(HUES[0], 0.55),
        (PassKind.AHEAD, PassKind.FORWARD, PassKind.LOSS),
    ),
    "backward": (colour(HUES[1], 0.5), (PassKind.BACKWARD, PassKind.INPUT_GRADIENT)),
    "gradients of weights": (colour(HUES[4], 0.5), (PassKind.WEIGHT_GRADIENT,)),
    "whole batch": (colour(HUES[3], 0.4), (PassKind.BETWEEN, PassKind.EXCHANGE)),
    "update": (colour(HUES[2], 0.5), (PassKind.UPDATE,)),
}
"""Legend entry → colour, and the pass kinds that it stands for."""


def pipeline(times: Times) -> str:
    """Draw a track of tasks for every stage; empty above `MAX_TASKS` tasks."""
    graph = times.schedule.graph
    if not times.step_time_s or len(graph.tasks) > MAX_TASKS:
        return ""
    background = {k: paint for paint, kinds in COLOURS.values() for k in kinds}
    to_percent = 100 / times.step_time_s
    lines, seen = [], set[PassKind]()
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
