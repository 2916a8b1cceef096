"""Times of one step, and quantities derived from them: idle shares, memory, overlap."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from rhino_jax.pipeline.memory import Profile, memory_of
from rhino_jax.pipeline.tasks import Schedule


@dataclass(frozen=True)
class Times:
    """Start times of all tasks and transfers of one step.

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
    def transfer_end_s(self) -> tuple[float, ...]:
        transfers = self.schedule.graph.transfers
        starts = self.transfer_start_s
        return tuple(s + t.seconds for s, t in zip(starts, transfers, strict=True))

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
