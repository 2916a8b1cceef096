"""Simulation of a schedule, and checks that it can run: complete, free of deadlocks,
within memory."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from rhino_jax.errors import DeadlockError, ScheduleError, ScheduleMemoryError
from rhino_jax.pipeline.simulation import Simulation
from rhino_jax.pipeline.tasks import Schedule
from rhino_jax.units import format_bytes, format_seconds


def simulate(schedule: Schedule) -> Simulation:
    """Simulate a schedule by discrete events: the ends of tasks and transfers, in time
    order.

    A group runs its tasks in the order of the schedule, each as soon as its inputs are
    available. Transfers overlap with tasks; a link carries one at a time, in the order
    in which they become ready (at equal times: in the order of the graph).

    Raises:
      DeadlockError: tasks wait for one another in a cycle.
    """
    graph = schedule.graph
    count = len(graph.tasks)
    start, sequence = [0.0] * len(graph.seconds), list[int]()
    ended = [False] * count
    # The previous task in the group's order is one more dependency.
    next_of = {a: b for order in schedule.orders for a, b in pairwise(order)}
    missing = list(map(len, graph.before))
    for task in next_of.values():
        missing[task] += 1
    events: list[tuple[float, int]] = []
    free_at = [0.0] * len(graph.links)

    def begin(node: int, now: float) -> None:
        """Start a task, or a transfer as soon as its link is free."""
        if node >= count:
            link = graph.transfers[node - count].link
            now = max(now, free_at[link])
            free_at[link] = now + graph.seconds[node]
        start[node] = now
        sequence.append(node)
        heapq.heappush(events, (now + graph.seconds[node], node))

    for order in schedule.orders:
        if order and not missing[order[0]]:
            begin(order[0], 0.0)
    while events:
        now, ending = heapq.heappop(events)
        waiting = list(graph.after[ending])
        if ending < count:
            ended[ending] = True
            waiting += [next_of[ending]] if ending in next_of else []
        for node in waiting:
            missing[node] -= 1
            if not missing[node]:
                begin(node, now)
    if not all(ended):
        raise deadlock(schedule, ended)
    return Simulation(
        schedule, tuple(start[:count]), tuple(start[count:]), tuple(sequence)
    )


def deadlock(schedule: Schedule, ended: Sequence[bool]) -> DeadlockError:
    """Return the error for a schedule that stopped before its end.

    It names a cycle of tasks, each of which waits for the one before.

    Args:
      schedule: a schedule that deadlocks.
      ended: whether each task has ended.
    """
    graph, path = schedule.graph, list[int]()
    previous = {b: a for order in schedule.orders for a, b in pairwise(order)}

    task = ended.index(False)
    while task not in path:
        path.append(task)
        before = *graph.sources(task), previous.get(task, task)
        held = (t for t in before if t != task and not ended[t])
        task = next(held, path[0])
    circle = path[path.index(task) :][::-1]
    return DeadlockError(
        f"`{schedule.name}`: tasks wait for one another.",
        where=" ← ".join(
            f"{t} (group {t.group})" for t in map(graph.tasks.__getitem__, circle)
        ),
        numbers=f"{sum(ended)} of {len(ended)} tasks ended",
        fix="let every group run the earlier of its tasks in that circle first.",
    )


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
