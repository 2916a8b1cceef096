"""Cycles of waiting tasks, in a schedule that deadlocked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from rhino_jax.pipeline.tasks import Schedule


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
