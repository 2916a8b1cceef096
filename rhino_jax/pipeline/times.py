"""Times of one step, and what follows from them: idle shares, memory, overlap."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from rhino_jax.pipeline.memory import Profile, memory_of
from rhino_jax.pipeline.tasks import Schedule


@dataclass(frozen=True)
class Times:
    """When everything of one step runs.

    Attributes:
      schedule: what ran.
      task_start_s, transfer_start_s: of everything in its graph.
      sequence: all that started, in the order in which it did; transfers are numbered
        after tasks.
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
    def transfer_end_s(self) -> tuple[float, ...]:
        transfers = self.schedule.graph.transfers
        starts = self.transfer_start_s
        return tuple(s + t.seconds for s, t in zip(starts, transfers, strict=True))

    @cached_property
    def step_time_s(self) -> float:
        """From the first start of a task to the last end."""
        return max(self.task_end_s, default=0.0)

    @cached_property
    def busy_s(self) -> tuple[float, ...]:
        """Of every group, seconds in which it runs a task."""
        tasks = self.schedule.graph.tasks
        return tuple(sum(tasks[i].seconds for i in o) for o in self.schedule.orders)

    @cached_property
    def bubbles(self) -> tuple[float, ...]:
        """Of every group the share of the step in which it runs nothing."""
        if not self.step_time_s:
            return (0.0,) * len(self.busy_s)
        return tuple((self.step_time_s - b) / self.step_time_s for b in self.busy_s)

    @cached_property
    def bubble(self) -> float:
        """Share of all groups' time in which they run nothing.

        Of GPipe and 1F1B with equal tasks and S stages, (S - 1) / (m + S - 1).
        """
        room = self.step_time_s * len(self.busy_s)
        return (room - sum(self.busy_s)) / room if room else 0.0

    @cached_property
    def exposed_s(self) -> tuple[float, ...]:
        """Of every group, seconds in which it waits for a transfer alone: all that its
        next task reads has been made."""
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
        """Of every group, seconds in which its link to the host is busy, each way."""
        graph, found = self.schedule.graph, [0.0] * self.schedule.graph.groups
        for t in graph.transfers:
            if t.is_to_host:  # As much comes back.
                found[graph.receiver(t)] += t.seconds
        return tuple(found)

    @cached_property
    def memory(self) -> tuple[Profile, ...]:
        """Of every group the bytes that one of its devices holds, over time."""
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
        """Of the group that holds the most."""
        return max(self.group_peak_bytes, default=0)
