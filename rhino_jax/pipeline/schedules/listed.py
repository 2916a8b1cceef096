"""List scheduling, and a lower bound on the time of any order of a graph's tasks.

Whenever a group is idle it runs the most urgent task that fits.

Source: Graham, "Bounds on multiprocessing timing anomalies" (SIAM 1969); Rhino's
scheduler of task graphs lists tasks in the same way, by kind and micro-batch.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from graphlib import TopologicalSorter

import numpy as np

from rhino_jax.errors import ScheduleError
from rhino_jax.pipeline.tasks import Schedule, Task, TaskGraph, TaskKind


def bound_s(graph: TaskGraph) -> float:
    """Return a lower bound on the step time, in seconds.

    The larger of the critical path, and for every group: the shortest path to any of
    its tasks, plus all its tasks, plus the shortest path from any of them to the end.
    """
    heads, tails = ways_to(graph), ways_to_end(graph)
    best = max(tails, default=0.0)
    for group in range(graph.groups):
        mine = [i for i, t in enumerate(graph.tasks) if t.group == group]
        if mine:
            busy = sum(graph.tasks[i].seconds for i in mine)
            first = min(heads[i] for i in mine)
            last = min(tails[i] - graph.tasks[i].seconds for i in mine)
            best = max(best, first + busy + last)
    return best


def ways_to(graph: TaskGraph) -> list[float]:
    """Return by task the seconds of the longest path that ends at its start."""
    ways = [0.0] * len(graph.tasks)
    for i in _in_order(graph):
        end = ways[i] + graph.tasks[i].seconds
        for reader in graph.readers[i]:
            ways[reader] = max(ways[reader], end)
        for t in graph.outgoing[i]:
            arrives = end + graph.transfers[t].seconds
            for reader in graph.transfers[t].targets:
                ways[reader] = max(ways[reader], arrives)
    return ways


def ways_to_end(graph: TaskGraph) -> list[float]:
    """Return by task the seconds of the longest path from its start to the end."""
    ways = [0.0] * len(graph.tasks)
    for i in reversed(_in_order(graph)):
        after = [ways[reader] for reader in graph.readers[i]]
        after += [
            graph.transfers[t].seconds + ways[reader]
            for t in graph.outgoing[i]
            for reader in graph.transfers[t].targets
        ]
        ways[i] = graph.tasks[i].seconds + max(after, default=0.0)
    return ways


def _in_order(graph: TaskGraph) -> list[int]:
    """Return the tasks in a topological order, whatever the schedule."""
    before = {i: graph.sources(i) for i in range(len(graph.tasks))}
    return [*TopologicalSorter(before).static_order()]


_BACKWARD_FIRST = {
    TaskKind.UPDATE: 0, TaskKind.BETWEEN: 0, TaskKind.BACKWARD: 1,
    TaskKind.INPUT_GRADIENT: 1, TaskKind.FORWARD: 2, TaskKind.WEIGHT_GRADIENT: 3,
}  # fmt: skip


_Needs = tuple[int, int, int]
"""(bytes that a task reserves, its temporary bytes, number of activations that it
reserves)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PriorityRule:
    """A rule that ranks the tasks that can run.

    Attributes:
      by_path: whether the task with the longest path to the end of the step comes
        first; otherwise input gradients before forward passes before weight gradients,
        and among forward passes later chunks first.
      most_in_flight: by group, the largest number of activations that it may hold;
        empty: any number. Its memory limit applies in addition.
      is_reserved: whether a group that starts a micro-batch reserves what all its
        chunks will hold of it; otherwise it starts more, and may deadlock.
      noise: scale of random noise on the priorities, to find other schedules.
      seed: seed of the noise.
    """

    by_path: bool = False
    most_in_flight: tuple[int, ...] = ()
    is_reserved: bool = True
    noise: float = 0.0
    seed: int = 0


def listed(name: str, graph: TaskGraph, rule: PriorityRule) -> Schedule:
    """Build a schedule by one rule.

    Raises:
      ScheduleError: memory, or the limit of micro-batches in flight, lets no task run.
    """
    run = _Lister(graph, urgency(graph, rule), rule)
    run.go()
    ended = sum(map(len, run.orders))
    if ended < len(graph.tasks):
        raise ScheduleError(
            f"`{name}`: no group can go on within its memory.",
            numbers=f"{ended} of {len(graph.tasks)} tasks were placed",
            fix="allow more memory or more micro-batches in flight.",
        )
    return Schedule(name, graph, tuple(map(tuple, run.orders)))


def urgency(graph: TaskGraph, rule: PriorityRule) -> list[float]:
    """Return a priority by task; the smallest number comes first."""
    noise = np.random.default_rng(rule.seed).standard_normal(len(graph.tasks))
    if rule.by_path:
        ways = ways_to_end(graph)
        scale = rule.noise * max(ways, default=0.0)
        return [-w + scale * x for w, x in zip(ways, noise, strict=True)]
    chunks = 1 + max(t.chunk for t in graph.tasks)
    batches = 1 + max(t.micro_batch for t in graph.tasks)
    slices = 1 + max(t.slice for t in graph.tasks)

    def number(task: Task) -> float:
        is_forward = task.kind is TaskKind.FORWARD
        chunk = chunks - task.chunk if is_forward else task.chunk
        place = (task.micro_batch, task.slice if is_forward else slices - task.slice)
        among = (chunk * batches + place[0]) * (slices + 1) + place[1]
        if not is_forward:
            among = (place[0] * (slices + 1) + place[1]) * (chunks + 1) + chunk
        whole = (chunks + 1) * (batches + 1) * (slices + 1)
        return _BACKWARD_FIRST[task.kind] + among / whole

    return [number(t) + rule.noise * x for t, x in zip(graph.tasks, noise, strict=True)]


class _Lister:
    """The event loop: ends of tasks and transfers in time order, and choices of
    groups."""

    def __init__(
        self, graph: TaskGraph, urgency: list[float], rule: PriorityRule
    ) -> None:
        self.graph = graph
        self.urgency = urgency
        self.count = len(graph.tasks)
        self.orders: list[list[int]] = [[] for _ in range(graph.groups)]
        # Of ready tasks with equal needs only the most urgent one is considered.
        self.ready: list[dict[_Needs, list[tuple[float, int]]]] = [
            {} for _ in range(graph.groups)
        ]
        self.is_free = [True] * graph.groups
        self.link_free_at = [0.0] * len(graph.links)
        self.missing = [
            len(t.after) + len(graph.incoming[i]) for i, t in enumerate(graph.tasks)
        ]
        self.budget = _Budget(graph, rule)
        self.events: list[tuple[float, int]] = []

    def go(self) -> None:
        for i, missing in enumerate(self.missing):
            if not missing:
                self._ready(i)
        now = 0.0
        while True:
            for group, is_free in enumerate(self.is_free):
                if is_free:
                    self._choose(group, now)
            if not self.events:
                return
            now = self.events[0][0]
            while self.events and self.events[0][0] <= now:
                self._end(heapq.heappop(self.events)[1], now)

    def _ready(self, task: int) -> None:
        ready = self.ready[self.graph.tasks[task].group]
        alike = ready.setdefault(self.budget.needs[task], [])
        heapq.heappush(alike, (self.urgency[task], task))

    def _choose(self, group: int, now: float) -> None:
        first: list[tuple[float, int]] = []
        for needs, alike in self.ready[group].items():
            is_first = alike and (not first or alike[0] < first[0])
            if is_first and self.budget.fits(group, needs):
                first = alike
        if not first:
            return
        _, task = heapq.heappop(first)
        self.budget.take(task)
        self.is_free[group] = False
        self.orders[group].append(task)
        heapq.heappush(self.events, (now + self.graph.tasks[task].seconds, task))

    def _end(self, node: int, now: float) -> None:
        graph = self.graph
        if node >= self.count:
            self._arrive(graph.transfers[node - self.count].targets)
            return
        self.is_free[graph.tasks[node].group] = True
        self.budget.give_back(node)
        for i in graph.outgoing[node]:
            transfer = graph.transfers[i]
            start = max(now, self.link_free_at[transfer.link])
            self.link_free_at[transfer.link] = start + transfer.seconds
            heapq.heappush(self.events, (start + transfer.seconds, self.count + i))
        self._arrive(graph.readers[node])

    def _arrive(self, tasks: tuple[int, ...]) -> None:
        for task in tasks:
            self.missing[task] -= 1
            if not self.missing[task]:
                self._ready(task)


class _Budget:
    """Bytes and activations that are still available to each group."""

    def __init__(self, graph: TaskGraph, rule: PriorityRule) -> None:
        self.graph = graph
        base = graph.base_bytes
        limits = graph.limit_bytes
        self.bytes = [
            limits[g] - base[g] if limits else 2**62 for g in range(graph.groups)
        ]
        self.number = [
            rule.most_in_flight[g] if rule.most_in_flight else 2**62
            for g in range(graph.groups)
        ]
        self.frees: list[list[tuple[int, int]]] = [[] for _ in graph.tasks]
        self.left = [[len(h.until) for h in t.holds] for t in graph.tasks]
        for i, task in enumerate(graph.tasks):
            for h, hold in enumerate(task.holds):
                for until in hold.until:
                    self.frees[until].append((i, h))
        kinds = {t.kind for t in graph.tasks}
        is_split = TaskKind.WEIGHT_GRADIENT in kinds
        self.last = TaskKind.WEIGHT_GRADIENT if is_split else TaskKind.BACKWARD
        sets_aside = self._forwards() if rule.is_reserved else _each(graph)
        self.needs = [self._needs(i, sets_aside(i)) for i in range(len(graph.tasks))]

    def _forwards(self) -> Callable[[int], list[int]]:
        """Return a function: first forward task of a group's micro-batch → all of them.

        Other tasks are mapped to none.
        """
        found: dict[tuple[int, int], list[int]] = {}
        for i, task in enumerate(self.graph.tasks):
            if task.kind is TaskKind.FORWARD:
                found.setdefault((task.group, task.micro_batch), []).append(i)
        by_first = {min(tasks): tasks for tasks in found.values()}
        return lambda task: by_first.get(task, [])

    def _needs(self, task: int, forwards: list[int]) -> _Needs:
        """Return the needs of a task; a forward task reserves for all of `forwards`."""
        tasks = self.graph.tasks
        holders = forwards if tasks[task].kind is TaskKind.FORWARD else [task]
        size = sum(h.bytes for i in holders for h in tasks[i].holds)
        return size, tasks[task].working_bytes, len(forwards)

    def fits(self, group: int, needs: _Needs) -> bool:
        size, working, number = needs
        # Tasks that reserve nothing always fit: otherwise nothing is ever freed.
        has_room = size + working <= self.bytes[group] or not size
        return has_room and number <= self.number[group]

    def take(self, task: int) -> None:
        group = self.graph.tasks[task].group
        size, _, number = self.needs[task]
        self.bytes[group] -= size
        self.number[group] -= number

    def give_back(self, task: int) -> None:
        done = self.graph.tasks[task]
        self.number[done.group] += done.kind is self.last
        for holder, h in self.frees[task]:
            self.left[holder][h] -= 1
            if not self.left[holder][h]:
                self.bytes[done.group] += self.graph.tasks[holder].holds[h].bytes


def _each(graph: TaskGraph) -> Callable[[int], list[int]]:
    """Return a function: forward task → itself alone."""
    return lambda i: [i] if graph.tasks[i].kind is TaskKind.FORWARD else []
