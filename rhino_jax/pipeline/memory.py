"""Memory of groups over time: parameters, residuals, received values."""

from __future__ import annotations

import itertools
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
    for transfer, since in zip(graph.transfers, sent, strict=True):
        if transfer.is_to_host:
            since, until = starts[transfer.source], since + transfer.seconds
        else:
            until = max(starts[t] for t in transfer.targets)
        hold(graph.receiver(transfer), since, until, transfer.bytes)
    found = []
    for of_group, base in zip(changes, graph.base_bytes, strict=True):
        times, sizes = map(np.array, zip((0.0, 0), *sorted(of_group), strict=True))
        # Bytes freed at a time are available to tasks that start then.
        is_last = np.append(np.diff(times) > 0, True)
        found.append(Profile(times[is_last], base + np.cumsum(sizes)[is_last]))
    return tuple(found)


def in_flight(schedule: Schedule) -> tuple[int, ...]:
    """Return by group the largest number of forward passes whose residuals it holds.

    Determined by the order alone, whatever the durations. S - s at stage s for 1F1B;
    the number of micro-batches for GPipe. Every chunk and slice counts as one.
    """
    weight = {TaskKind.FORWARD: 1, schedule.graph.last_kind: -1}
    steps = [weight.get(task.kind, 0) for task in schedule.graph.tasks]
    return tuple(
        max(itertools.accumulate((steps[i] for i in order), initial=0))
        for order in schedule.orders
    )
