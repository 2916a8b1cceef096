"""Memory of groups over time: parameters, residuals, received values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rhino_jax.pipeline.tasks import Schedule, TaskGraph, TaskKind


@dataclass(frozen=True)
class Profile:
    """Live bytes over time, as a step function.

    Attributes:
      times_s: times at which live bytes change, ascending.
      bytes: live bytes from each of these times on.
    """

    times_s: np.ndarray
    bytes: np.ndarray

    @property
    def peak_bytes(self) -> int:
        return int(self.bytes.max())

    @property
    def peak_at_s(self) -> float:
        """Time at which the peak is first reached."""
        return float(self.times_s[int(self.bytes.argmax())])


def memory_of(
    graph: TaskGraph,
    starts: Sequence[float],
    ends: Sequence[float],
    sent: Sequence[float],
    step_time_s: float,
) -> tuple[Profile, ...]:
    """Return the live bytes over time of one device of each group.

    Args:
      graph: tasks, with the memory that they allocate and free.
      starts, ends: seconds at which every task starts and ends.
      sent: start of each transfer: its bytes are live on the receiver from then until
        its last reader starts, whose own memory includes them; for transfers to hosts
        see `Transfer`.
      step_time_s: time at which memory that no task frees is freed.
    """
    changes: list[list[tuple[float, int]]] = [[] for _ in range(graph.groups)]

    def hold(group: int, start: float, end: float, size: int) -> None:
        if size:
            changes[group] += ((start, size), (end, -size))

    for i, task in enumerate(graph.tasks):
        hold(task.group, starts[i], ends[i], task.working_bytes)
        for h in task.holds:
            end = max((ends[u] for u in h.until), default=step_time_s)
            hold(task.group, starts[i], end, h.bytes)
    for i, transfer in enumerate(graph.transfers):
        since = sent[i]
        if transfer.is_to_host:
            since, until = starts[transfer.source], since + transfer.seconds
        else:
            until = max(starts[t] for t in transfer.targets)
        hold(graph.receiver(transfer), since, until, transfer.bytes)
    return tuple(
        _profile(c, base) for c, base in zip(changes, graph.base_bytes, strict=True)
    )


def _profile(changes: list[tuple[float, int]], base: int) -> Profile:
    """Sum the changes; bytes freed at a time are available to tasks that start then."""
    ordered = sorted([(0.0, 0), *changes])
    times = np.array([t for t, _ in ordered])
    sums = base + np.cumsum([size for _, size in ordered])
    is_last = np.append(np.diff(times) > 0, True)
    return Profile(times[is_last], sums[is_last])


def in_flight(schedule: Schedule) -> tuple[int, ...]:
    """Return by group the largest number of forward passes whose residuals it holds.

    Determined by the order alone, whatever the durations. S - s at stage s for 1F1B;
    the number of micro-batches for GPipe. Every chunk and slice counts as one.
    """
    tasks = schedule.graph.tasks
    last = {t.kind for t in tasks} & {TaskKind.WEIGHT_GRADIENT}
    frees = TaskKind.WEIGHT_GRADIENT if last else TaskKind.BACKWARD
    found = []
    for order in schedule.orders:
        steps = [
            (tasks[i].kind is TaskKind.FORWARD) - (tasks[i].kind is frees)
            for i in order
        ]
        found.append(int(np.cumsum([0, *steps]).max()))
    return tuple(found)
