"""A simulated step as text."""

from __future__ import annotations

from rhino_jax.pipeline.tasks import Task, label
from rhino_jax.pipeline.times import Times
from rhino_jax.units import format_bytes, format_seconds, format_share


def to_text(times: Times, width: int = 100) -> str:
    """Return a heading, a timeline with a line per group, and a table of groups.

    In the timeline `F0` is the forward pass of micro-batch 0, `B` a backward pass, `I`
    and `W` the gradients of inputs and of weights, `M` the task of the whole batch, `U`
    the update; lower case (`f0`) is for a group's later chunks. Where there is no room
    for a number, letters stand alone.
    """
    schedule = times.schedule
    head = (
        f"{schedule.name}: {format_seconds(times.step_time_s)} a step, "
        f"bubble {format_share(times.bubble)}"
    )
    names = [str(g) for g in range(len(schedule.orders))]
    margin = max(map(len, names)) + 2
    found = zip(names, lines_of(times, width - margin - 1), strict=True)
    lines = [f"{name:>{margin}} {line}".rstrip() for name, line in found]
    return "\n".join([head, *lines, "", *_table(times)])


def lines_of(times: Times, columns: int) -> list[str]:
    """Return a timeline by group, tasks from start to end; spaces are idle time."""
    return [_line(times, g, columns) for g in range(len(times.schedule.orders))]


def _line(times: Times, group: int, columns: int) -> str:
    """Return the timeline of a group."""
    scale = columns / times.step_time_s if times.step_time_s else 0.0
    tasks = times.schedule.graph.tasks
    order = times.schedule.orders[group]
    first = min((tasks[i].chunk for i in order), default=0)
    line = [" "] * columns
    for i in order:
        start = round(times.task_start_s[i] * scale)
        end = round(times.task_end_s[i] * scale)
        line[start:end] = _cell(tasks[i], end - start, tasks[i].chunk != first)
    return "".join(line)


def _cell(task: Task, width: int, is_later: bool) -> str:
    text = label(task)
    if len(text) > width:
        text = task.kind.letter
    text = text.lower() if is_later else text
    return text.ljust(width, "─")[:width]


def _table(times: Times) -> list[str]:
    header: tuple[str, ...] = (
        "group", "busy", "bubble", "waits for transfers", "peak memory",
    )  # fmt: skip
    rows: list[tuple[str, ...]] = [
        (
            str(group),
            format_seconds(times.busy_s[group]),
            format_share(times.bubbles[group]),
            format_seconds(times.exposed_s[group]),
            format_bytes(times.group_peak_bytes[group]),
        )
        for group in range(len(times.schedule.orders))
    ]
    on_links = times.host_s
    if any(on_links):
        header = (*header, "to and from host")
        busy = map(format_seconds, on_links)
        rows = [(*row, cell) for row, cell in zip(rows, busy, strict=True)]
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    return [
        "  " + "  ".join(f"{c:>{w}}" for c, w in zip(row, widths, strict=True))
        for row in (header, *rows)
    ]
