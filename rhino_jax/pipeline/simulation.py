"""A simulated step: its times, and quantities derived from them (idle shares, memory,
overlap); as text, and in the format of Chrome's traces, which Perfetto reads.

Source: "Trace Event Format" (Google, 2016): complete events `X`, counters `C`, flows
`s` and `f`, metadata `M`; times in microseconds.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

from rhino_jax.pipeline.memory import Profile, memory_of
from rhino_jax.pipeline.tasks import Schedule, label
from rhino_jax.units import format_bytes, format_seconds, format_share
from rhino_jax.utils.atomic_write import write_file


@dataclass(frozen=True)
class Simulation:
    """One simulated step of a schedule: start times of all tasks and transfers.

    Attributes:
      schedule: the schedule that was simulated.
      task_start_s, transfer_start_s: start of every task and transfer, in seconds.
      sequence: nodes in the order in which they start; transfers are numbered after
        tasks.
    """

    schedule: Schedule
    task_start_s: tuple[float, ...]
    transfer_start_s: tuple[float, ...]
    sequence: tuple[int, ...]

    @cached_property
    def task_end_s(self) -> tuple[float, ...]:
        tasks = self.schedule.graph.tasks
        return tuple(
            s + t.seconds for s, t in zip(self.task_start_s, tasks, strict=True)
        )

    @cached_property
    def step_time_s(self) -> float:
        """Seconds from the first start of a task to the last end."""
        return max(self.task_end_s, default=0.0)

    @cached_property
    def busy_s(self) -> tuple[float, ...]:
        """Seconds in which each group runs tasks."""
        tasks = self.schedule.graph.tasks
        return tuple(sum(tasks[i].seconds for i in o) for o in self.schedule.orders)

    @cached_property
    def bubbles(self) -> tuple[float, ...]:
        """Share of the step in which each group is idle."""
        if not self.step_time_s:
            return (0.0,) * len(self.busy_s)
        return tuple((self.step_time_s - b) / self.step_time_s for b in self.busy_s)

    @cached_property
    def bubble(self) -> float:
        """Share of all groups' time in which they are idle.

        (S - 1) / (m + S - 1) for GPipe and 1F1B with equal tasks and S stages.
        """
        room = self.step_time_s * len(self.busy_s)
        return (room - sum(self.busy_s)) / room if room else 0.0

    @cached_property
    def exposed_s(self) -> tuple[float, ...]:
        """Seconds in which each group waits for a transfer alone.

        That is, all inputs of its next task have been computed, but not all have
        arrived.
        """
        graph, ends = self.schedule.graph, self.task_end_s
        found = []
        for order in self.schedule.orders:
            waited, free = 0.0, 0.0
            for task in order:
                made = max((ends[i] for i in graph.sources(task)), default=0.0)
                waited += max(self.task_start_s[task] - max(made, free), 0.0)
                free = ends[task]
            found.append(waited)
        return tuple(found)

    @cached_property
    def host_s(self) -> tuple[float, ...]:
        """Seconds in which each group's link to the host is busy, each way."""
        graph, found = self.schedule.graph, [0.0] * self.schedule.graph.groups
        for t in graph.transfers:
            if t.is_to_host:  # The same bytes are fetched back.
                found[graph.receiver(t)] += t.seconds
        return tuple(found)

    @cached_property
    def memory(self) -> tuple[Profile, ...]:
        """Live bytes over time of one device of each group."""
        return memory_of(
            self.schedule.graph,
            self.task_start_s,
            self.task_end_s,
            self.transfer_start_s,
            self.step_time_s,
        )

    @cached_property
    def group_peak_bytes(self) -> tuple[int, ...]:
        return tuple(profile.peak_bytes for profile in self.memory)

    @property
    def peak_bytes(self) -> int:
        """Peak of the group with the highest one, in bytes of one device."""
        return max(self.group_peak_bytes, default=0)

    def __repr__(self) -> str:
        graph = self.schedule.graph
        return (
            f"Simulation({self.schedule.name}, {graph.groups} groups,"
            f" {len(graph.tasks)} tasks: {format_seconds(self.step_time_s)}/step,"
            f" bubble {format_share(self.bubble)},"
            f" peak {format_bytes(self.peak_bytes)})"
        )

    def table(self, width: int = 100) -> str:
        """Return the step as text: a timeline, then idle time, waits and memory."""
        return to_text(self, width)

    def save_trace(self, path: str | PathLike[str]) -> None:
        """Write the step for Perfetto or chrome://tracing.

        Args:
          path: ends in `.json`, or in `.json.gz` for a compressed file.
        Raises:
          WriteError: the file cannot be written.
        """
        write(events(self), path)


def to_text(times: Simulation, width: int = 100) -> str:
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


def lines_of(times: Simulation, columns: int) -> list[str]:
    """Return a timeline by group, tasks from start to end; spaces are idle time."""
    scale = columns / times.step_time_s if times.step_time_s else 0.0
    tasks, lines = times.schedule.graph.tasks, []
    for order in times.schedule.orders:
        first = min((tasks[i].chunk for i in order), default=0)
        line = [" "] * columns
        for i in order:
            start = round(times.task_start_s[i] * scale)
            end = round(times.task_end_s[i] * scale)
            text, width = label(tasks[i]), end - start
            text = text[0] if len(text) > width else text
            text = text if tasks[i].chunk == first else text.lower()
            line[start:end] = text.ljust(width, "─")[:width]
        lines.append("".join(line))
    return lines


def _table(times: Simulation) -> list[str]:
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


Event = dict[str, Any]

_US = 1e6


def write(found: Iterable[Event], path: str | PathLike[str]) -> None:
    """Write events to a file; compressed if the path ends in `.gz`.

    Raises:
      WriteError: the file cannot be written.
    """
    text = json.dumps({"displayTimeUnit": "ms", "traceEvents": [*found]})
    is_packed = Path(path).suffix == ".gz"
    content = gzip.compress(text.encode(), mtime=0) if is_packed else text
    write_file("`save_trace`", path, content)


def events(times: Simulation) -> Iterator[Event]:
    """Yield one process per group, with its tasks and memory, and one for links.

    Arrows lead from a task to its transfer, and from there to the tasks that read it.
    """
    graph = times.schedule.graph
    links = graph.groups
    for group in range(graph.groups):
        yield named("process_name", group, 0, f"group {group}")
    if graph.links:
        yield named("process_name", links, 0, "links")
    for i, link in enumerate(graph.links):
        yield named("thread_name", links, i, link.name)
    yield from _tasks(times)
    yield from _transfers(times, links)
    for group, profile in enumerate(times.memory):
        for time, held in zip(profile.times_s, profile.bytes, strict=True):
            yield {
                "ph": "C",
                "name": "bytes",
                "pid": group,
                "ts": float(time) * _US,
                "args": {"held": int(held)},
            }


def named(what: str, pid: int, tid: int, name: str) -> Event:
    """Return the event that names a process or a thread."""
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _tasks(times: Simulation) -> Iterator[Event]:
    for task, start in zip(times.schedule.graph.tasks, times.task_start_s, strict=True):
        yield {
            "ph": "X",
            "name": label(task),
            "cat": str(task.kind),
            "pid": task.group,
            "tid": 0,
            "ts": start * _US,
            "dur": task.seconds * _US,
            "args": {
                "chunk": task.chunk,
                "micro-batch": task.micro_batch,
                "slice": task.slice,
            },
        }


def _transfers(times: Simulation, pid: int) -> Iterator[Event]:
    graph = times.schedule.graph
    for i, transfer in enumerate(graph.transfers):
        start = times.transfer_start_s[i] * _US
        end = (times.transfer_start_s[i] + transfer.seconds) * _US
        source = graph.tasks[transfer.source]
        # A fetch is labelled by its reader, others by their source.
        is_own = graph.receiver(transfer) == source.group and not transfer.is_to_host
        named = graph.tasks[transfer.targets[0]] if is_own else source
        place = {"pid": pid, "tid": transfer.link}
        yield {
            "ph": "X",
            "name": label(named),
            "cat": "transfer",
            **place,
            "ts": start,
            "dur": transfer.seconds * _US,
            "args": {"bytes": transfer.bytes},
        }
        flow = {"cat": "transfer", "name": "sent", "id": i}
        made = times.task_end_s[transfer.source] * _US
        yield {"ph": "s", **flow, "pid": source.group, "tid": 0, "ts": made}
        yield {"ph": "t", **flow, **place, "ts": start}
        if not transfer.targets:
            continue
        reader = graph.tasks[transfer.targets[0]]
        read = max(times.task_start_s[transfer.targets[0]] * _US, end)
        yield {
            "ph": "f", "bp": "e", **flow, "pid": reader.group, "tid": 0, "ts": read,
        }  # fmt: skip
