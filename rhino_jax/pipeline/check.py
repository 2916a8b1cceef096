"""Checks that a schedule can run: complete, free of deadlocks, within memory."""

from __future__ import annotations

from collections import Counter

from rhino_jax.errors import ScheduleError, ScheduleMemoryError
from rhino_jax.pipeline.simulation import Simulation
from rhino_jax.pipeline.simulator import simulate
from rhino_jax.pipeline.tasks import Schedule
from rhino_jax.units import format_bytes, format_seconds


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
