"""A simulated step in the format of Chrome's traces, which Perfetto reads.

Source: "Trace Event Format" (Google, 2016): complete events `X`, counters `C`, flows
`s` and `f`, metadata `M`; times in microseconds.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator
from os import PathLike
from pathlib import Path
from typing import Any

from rhino_jax.pipeline.tasks import label
from rhino_jax.pipeline.times import Times
from rhino_jax.utils.atomic_write import write_file


Event = dict[str, Any]

_US = 1e6


def save(times: Times, path: str | PathLike[str]) -> None:
    """Write all events of a step; compressed if the path ends in `.gz`.

    Raises:
      WriteError: the file cannot be written.
    """
    write(events(times), path)


def write(found: Iterable[Event], path: str | PathLike[str]) -> None:
    """Write events to a file; compressed if the path ends in `.gz`.

    Raises:
      WriteError: the file cannot be written.
    """
    text = json.dumps({"displayTimeUnit": "ms", "traceEvents": [*found]})
    is_packed = Path(path).suffix == ".gz"
    content = gzip.compress(text.encode(), mtime=0) if is_packed else text
    write_file("`save_trace`", path, content)


def events(times: Times) -> Iterator[Event]:
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


def _tasks(times: Times) -> Iterator[Event]:
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


def _named_after(times: Times, transfer: int) -> int:
    """Return the task that labels a transfer: its source, or for fetches its reader."""
    graph, found = times.schedule.graph, times.schedule.graph.transfers[transfer]
    is_own = graph.receiver(found) == graph.tasks[found.source].group
    return found.targets[0] if is_own and not found.is_to_host else found.source


def _transfers(times: Times, pid: int) -> Iterator[Event]:
    graph = times.schedule.graph
    for i, transfer in enumerate(graph.transfers):
        start, end = times.transfer_start_s[i] * _US, times.transfer_end_s[i] * _US
        source = graph.tasks[transfer.source]
        place = {"pid": pid, "tid": transfer.link}
        yield {
            "ph": "X",
            "name": label(graph.tasks[_named_after(times, i)]),
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
