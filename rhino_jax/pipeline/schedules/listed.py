"""List scheduling, and a lower bound on the time of any order of a graph's tasks.

Whenever a group is idle it runs the most urgent task that fits.

Source: Graham, "Bounds on multiprocessing timing anomalies" (SIAM 1969); Rhino's
scheduler of task graphs lists tasks in the same way, by kind and micro-batch.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from graphlib import TopologicalSorter
from typing import Any

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
    """Return by node the seconds of the longest path that ends at its start."""
    ways = [0.0] * len(graph.seconds)
    for i in _in_order(graph):
        before = (ways[other] + graph.seconds[other] for other in graph.before[i])
        ways[i] = max(before, default=0.0)
    return ways


def ways_to_end(graph: TaskGraph) -> list[float]:
    """Return by node the seconds of the longest path from its start to the end."""
    ways = [0.0] * len(graph.seconds)
    for i in reversed(_in_order(graph)):
        after = max((ways[other] for other in graph.after[i]), default=0.0)
        ways[i] = graph.seconds[i] + after
    return ways


def _in_order(graph: TaskGraph) -> list[int]:
    """Return the nodes in a topological order, whatever the schedule."""
    return [*TopologicalSorter(dict(enumerate(graph.before))).static_order()]


_BACKWARD_FIRST = {
    TaskKind.UPDATE: 0, TaskKind.BETWEEN: 0, TaskKind.BACKWARD: 1,
    TaskKind.INPUT_GRADIENT: 1, TaskKind.FORWARD: 2, TaskKind.WEIGHT_GRADIENT: 3,
}  # fmt: skip


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


def urgency(graph: TaskGraph, rule: PriorityRule) -> list[float]:
    """Return a priority by task; the smallest number comes first."""
    tasks = graph.tasks
    noise = np.random.default_rng(rule.seed).standard_normal(len(tasks))
    if rule.by_path:
        ways = ways_to_end(graph)[: len(tasks)]
        scale = rule.noise * max(ways, default=0.0)
        return [-w + scale * x for w, x in zip(ways, noise, strict=True)]
    chunks = 1 + max(t.chunk for t in tasks)
    batches = 1 + max(t.micro_batch for t in tasks)
    slices = 1 + max(t.slice for t in tasks)

    def number(task: Task) -> float:
        among = (task.micro_batch * (slices + 1) + slices - task.slice) * (chunks + 1)
        among += task.chunk
        if task.kind is TaskKind.FORWARD:
            among = (chunks - task.chunk) * batches + task.micro_batch
            among = among * (slices + 1) + task.slice
        whole = (chunks + 1) * (batches + 1) * (slices + 1)
        return _BACKWARD_FIRST[task.kind] + among / whole

    return [number(t) + rule.noise * x for t, x in zip(tasks, noise, strict=True)]


def listed(name: str, graph: TaskGraph, rule: PriorityRule) -> Schedule:
    """Build a schedule by one rule.

    The ends of tasks and transfers are events, in time order; at the end of each, every
    idle group chooses a task.

    Raises:
      ScheduleError: memory, or the limit of micro-batches in flight, lets no task run.
    """
    count, groups = len(graph.tasks), range(graph.groups)
    ranks, needs = urgency(graph, rule), _needs(graph, is_reserved=rule.is_reserved)
    orders: list[list[int]] = [[] for _ in groups]
    # Of ready tasks with equal needs only the most urgent one is considered.
    ready: list[dict[tuple[int, ...], list[tuple[float, int]]]] = [{} for _ in groups]
    is_free, missing = [True for _ in groups], list(map(len, graph.before))
    link_free_at = [0.0] * len(graph.links)
    events: list[tuple[float, int]] = []
    # Bytes and activations that are still available to each group.
    limits = graph.limit_bytes or (2**62,) * graph.groups
    room = [a - b for a, b in zip(limits, graph.base_bytes, strict=True)]
    number = list(rule.most_in_flight or (2**62,) * graph.groups)
    # By task the memory that waits for its end, with the number of such tasks.
    frees: dict[int, list[tuple[int, list[int]]]] = {}
    for hold in (hold for task in graph.tasks for hold in task.holds):
        left = [len(hold.until)]
        for until in hold.until:
            frees.setdefault(until, []).append((hold.bytes, left))

    def is_ready(node: int, now: float) -> None:
        if node < count:
            alike = ready[graph.tasks[node].group].setdefault(needs[node], [])
            heapq.heappush(alike, (ranks[node], node))
            return
        link = graph.transfers[node - count].link
        link_free_at[link] = max(now, link_free_at[link]) + graph.seconds[node]
        heapq.heappush(events, (link_free_at[link], node))

    def choose(group: int, now: float) -> None:
        first: list[tuple[float, int]] = []
        for (size, working, reserved), alike in ready[group].items():
            # Tasks that reserve nothing always fit: otherwise nothing is ever freed.
            fits = size + working <= room[group] or not size
            if alike and (not first or alike[0] < first[0]):
                first = alike if fits and reserved <= number[group] else first
        if first:
            _, task = heapq.heappop(first)
            room[group] -= needs[task][0]
            number[group] -= needs[task][2]
            is_free[group] = False
            orders[group].append(task)
            heapq.heappush(events, (now + graph.seconds[task], task))

    def end(node: int, now: float) -> None:
        if node < count:
            task = graph.tasks[node]
            is_free[task.group] = True
            number[task.group] += task.kind is graph.last_kind
            for size, left in frees.get(node, ()):
                left[0] -= 1
                room[task.group] += 0 if left[0] else size
        for other in graph.after[node]:
            missing[other] -= 1
            if not missing[other]:
                is_ready(other, now)

    for node in range(count):
        if not missing[node]:
            is_ready(node, 0.0)
    now = 0.0
    while True:
        for group in groups:
            if is_free[group]:
                choose(group, now)
        if not events:
            break
        now = events[0][0]
        while events and events[0][0] <= now:
            end(heapq.heappop(events)[1], now)
    ended = sum(map(len, orders))
    if ended < count:
        raise ScheduleError(
            f"`{name}`: no group can go on within its memory.",
            numbers=f"{ended} of {count} tasks were placed",
            fix="allow more memory or more micro-batches in flight.",
        )
    return Schedule(name, graph, tuple(map(tuple, orders)))


def _needs(graph: TaskGraph, *, is_reserved: bool) -> list[tuple[int, int, int]]:
    """Return by task the bytes that it reserves, its temporary bytes, and the number of
    activations that it reserves.

    Args:
      graph: the tasks.
      is_reserved: whether the first forward task of a group's micro-batch reserves for
        all of them, and the others nothing; otherwise each for itself.
    """
    forwards: dict[Any, list[int]] = {}
    for i, task in enumerate(graph.tasks):
        if task.kind is TaskKind.FORWARD:
            of = (task.group, task.micro_batch) if is_reserved else i
            forwards.setdefault(of, []).append(i)
    by_first = {of[0]: of for of in forwards.values()}
    found = []
    for i, task in enumerate(graph.tasks):
        reserved = by_first.get(i, [])
        holders = reserved if task.kind is TaskKind.FORWARD else [i]
        size = sum(h.bytes for k in holders for h in graph.tasks[k].holds)
        found.append((size, task.working_bytes, len(reserved)))
    return found
