"""Simulation of a schedule, and checks that it can run: complete, free of deadlocks,
within memory."""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from itertools import pairwise

from rhino_jax.errors import DeadlockError, ScheduleError, ScheduleMemoryError
from rhino_jax.pipeline.simulation import Simulation
from rhino_jax.pipeline.tasks import Schedule
from rhino_jax.units import format_bytes, format_seconds


def circle_of(schedule: Schedule, ended: Sequence[bool]) -> tuple[int, ...]:
    """Return a cycle of tasks, each of which waits for the one before.

    Args:
      schedule: a schedule that deadlocks.
      ended: whether each task has ended.
    """
    before = {b: a for order in schedule.orders for a, b in pairwise(order)}
    path: list[int] = []
    seen: dict[int, int] = {}
    task = next(i for i, has_ended in enumerate(ended) if not has_ended)
    while task not in seen:
        seen[task] = len(path)
        path.append(task)
        held = (
            other
            for other in _waits_for(schedule, task, before)
            if other != task and not ended[other]
        )
        task = next(held, path[0])
    return tuple(path[seen[task] :][::-1])


def _waits_for(schedule: Schedule, task: int, before: dict[int, int]) -> Iterator[int]:
    """Yield the tasks that must end, or start, before a task can start."""
    graph = schedule.graph
    yield from graph.sources(task)
    if task in before:
        yield before[task]
    # If a source has ended, its transfer may wait for a receive buffer of the link: for
    # the readers of transfers that arrived first.
    links = {graph.transfers[t].link for t in graph.incoming[task]}
    for transfer in graph.transfers:
        if transfer.link in links and graph.links[transfer.link].buffers:
            yield from transfer.targets


def simulate(schedule: Schedule) -> Simulation:
    """Simulate a schedule by discrete events.

    A group runs its tasks in the order of the schedule, each as soon as its inputs are
    available. Transfers overlap with tasks; a link carries one at a time, in the order
    in which they become ready (at equal times: in the order of the graph).

    Raises:
      DeadlockError: tasks wait for one another in a cycle.
    """
    run = _EventLoop(schedule)
    run.go()
    if run.done < len(schedule.graph.tasks):
        raise deadlock(schedule, run.ended)
    return Simulation(
        schedule,
        task_start_s=tuple(run.task_start),
        transfer_start_s=tuple(run.transfer_start),
        sequence=tuple(run.sequence),
    )


def deadlock(schedule: Schedule, ended: list[bool]) -> DeadlockError:
    """Return the error for a schedule that stopped before its end."""
    circle = circle_of(schedule, ended)
    tasks = schedule.graph.tasks
    return DeadlockError(
        f"`{schedule.name}`: tasks wait for one another.",
        where=" ← ".join(f"{tasks[i]} (group {tasks[i].group})" for i in circle),
        numbers=f"{sum(ended)} of {len(tasks)} tasks ended",
        fix="let every group run the earlier of its tasks in that circle first, or"
        " give links more buffers.",
    )


class _EventLoop:
    """The event loop: one event for every end of a task or a transfer, in time order.

    Attributes:
      task_start, transfer_start: seconds at which each starts.
      sequence: nodes in the order in which they start; transfers are numbered after
        tasks.
      ended: whether each task has ended.
    """

    def __init__(self, schedule: Schedule) -> None:
        graph = schedule.graph
        self.graph = graph
        self.count = len(graph.tasks)
        self.seconds = [t.seconds for t in graph.tasks]
        self.task_start = [0.0] * self.count
        self.transfer_start = [0.0] * len(graph.transfers)
        self.sequence: list[int] = []
        self.ended = [False] * self.count
        self.done = 0
        self.next: list[int] = [-1] * self.count
        # The previous task in the group's order is one more dependency.
        self.missing = [
            len(task.after) + len(graph.incoming[i])
            for i, task in enumerate(graph.tasks)
        ]
        for order in schedule.orders:
            for a, b in pairwise(order):
                self.next[a] = b
                self.missing[b] += 1
        # The dependencies of a transfer are its source and earlier transfers.
        self.not_there = [1 + len(t.after) for t in graph.transfers]
        self.events: list[tuple[float, int]] = []
        self.queues: list[deque[int]] = [deque() for _ in graph.links]
        self.free_at = [0.0] * len(graph.links)
        self.taken = [0] * len(graph.links)
        self.unread = [len(t.targets) for t in graph.transfers]
        self.buffers = [link.buffers for link in graph.links]
        self.firsts = [order[0] for order in schedule.orders if order]

    def go(self) -> None:
        for first in self.firsts:
            if not self.missing[first]:
                self._start(first, 0.0)
        while self.events:
            now, node = heapq.heappop(self.events)
            if node < self.count:
                self._end_task(node, now)
            else:
                for target in self.graph.transfers[node - self.count].targets:
                    self._arrive(target, now)
                for transfer in self.graph.followers[node - self.count]:
                    self._is_ready(transfer, now)

    def _arrive(self, task: int, now: float) -> None:
        self.missing[task] -= 1
        if not self.missing[task]:
            self._start(task, now)

    def _start(self, task: int, now: float) -> None:
        self.task_start[task] = now
        self.sequence.append(task)
        heapq.heappush(self.events, (now + self.seconds[task], task))
        for transfer in self.graph.incoming[task]:
            self.unread[transfer] -= 1
            link = self.graph.transfers[transfer].link
            if not self.unread[transfer] and self.buffers[link]:
                self.taken[link] -= 1
                self._carry(link, now)

    def _end_task(self, task: int, now: float) -> None:
        self.ended[task] = True
        self.done += 1
        for transfer in self.graph.outgoing[task]:
            self._is_ready(transfer, now)
        for reader in self.graph.readers[task]:
            self._arrive(reader, now)
        if self.next[task] >= 0:
            self._arrive(self.next[task], now)

    def _is_ready(self, transfer: int, now: float) -> None:
        """Mark one dependency of a transfer as complete; after the last, enqueue it."""
        self.not_there[transfer] -= 1
        if not self.not_there[transfer]:
            link = self.graph.transfers[transfer].link
            self.queues[link].append(transfer)
            self._carry(link, now)

    def _carry(self, link: int, now: float) -> None:
        """Start the transfers in a link's queue while its receiver has free buffers."""
        queue, limit = self.queues[link], self.buffers[link]
        while queue and (not limit or self.taken[link] < limit):
            transfer = queue.popleft()
            self.taken[link] += bool(limit)
            start = max(now, self.free_at[link])
            self.transfer_start[transfer] = start
            self.free_at[link] = start + self.graph.transfers[transfer].seconds
            self.sequence.append(self.count + transfer)
            heapq.heappush(self.events, (self.free_at[link], self.count + transfer))


def checked(schedule: Schedule) -> Schedule:
    """Check a schedule and return it.

    Raises:
      ScheduleError: a task is missing, runs twice, or runs in another group than its
        own.
      DeadlockError: tasks wait for one another in a cycle.
      ScheduleMemoryError: a group exceeds its memory limit in the simulation.
    """
    check_complete(schedule)
    check_memory(simulate(schedule))
    return schedule


def check_complete(schedule: Schedule) -> None:
    """Refuse a schedule that does not run every task once, in its own group."""
    tasks = schedule.graph.tasks
    counts = Counter(i for order in schedule.orders for i in order)
    for group, order in enumerate(schedule.orders):
        for place, i in enumerate(order):
            if not 0 <= i < len(tasks) or tasks[i].group != group:
                known = (
                    f"a task of group {tasks[i].group}" if i < len(tasks) else "none"
                )
                raise ScheduleError(
                    f"`{schedule.name}`: a group runs a task that is not its own.",
                    where=f"group {group}, place {place}: task {i} is {known}",
                    numbers=f"{len(tasks)} tasks, {len(schedule.orders)} groups",
                    fix="give every task to the group that it names.",
                )
    wrong = [i for i in range(len(tasks)) if counts[i] != 1]
    if wrong:
        first = wrong[0]
        raise ScheduleError(
            f"`{schedule.name}`: not every task runs exactly once.",
            where=f"{tasks[first]} (group {tasks[first].group})",
            numbers=f"it runs {counts[first]} times; {len(wrong)} of {len(tasks)} tasks"
            " do not run once",
            fix="list every task of the graph once, in the order of its group.",
        )


def check_memory(simulation: Simulation) -> None:
    """Refuse a simulated step in which a group exceeds its memory limit."""
    schedule = simulation.schedule
    limits = schedule.graph.limit_bytes
    over = [
        (peak - limit, group)
        for group, (peak, limit) in enumerate(
            zip(simulation.group_peak_bytes, limits, strict=False)
        )
        if peak > limit
    ]
    if not over:
        return
    _, group = max(over)
    profile = simulation.memory[group]
    raise ScheduleMemoryError(
        f"`{schedule.name}` does not fit: group {group} holds too much.",
        where=f"group {group}, {format_seconds(profile.peak_at_s)} into the step",
        numbers=f"{format_bytes(profile.peak_bytes)} of a limit of "
        f"{format_bytes(limits[group])}, of these "
        f"{format_bytes(schedule.graph.base_bytes[group])} all the time",
        fix="take a schedule with fewer micro-batches in flight, as `1f1b`, smaller"
        " micro-batches, or more stages.",
    )
