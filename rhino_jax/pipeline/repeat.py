"""Several steps in a row, that nothing but what they read keeps in step."""

from __future__ import annotations

from dataclasses import replace

from rhino_jax.pipeline.tasks import Hold, Schedule, Task, TaskGraph, Transfer


def repeated(schedule: Schedule, steps: int) -> Schedule:
    """A schedule of several steps.

    A group starts its next step when its own last task has ended, whatever others do:
    groups drift apart, updates of later stages hide where these would idle, and delays
    are carried on. Only what is exchanged before updates brings groups together.

    Args:
      schedule: of one step.
      steps: how many. Micro-batches are numbered on; update and exchange have the
        number of their step in place of a micro-batch's.
    """
    graph = schedule.graph
    tasks, transfers = len(graph.tasks), len(graph.transfers)
    batches = 1 + max(t.micro_batch for t in graph.tasks)
    return Schedule(
        schedule.name,
        TaskGraph(
            groups=graph.groups,
            tasks=tuple(
                _later(task, step * tasks, step, batches)
                for step in range(steps)
                for task in graph.tasks
            ),
            transfers=tuple(
                _sent_later(graph.transfers[i], step * tasks, step * transfers)
                for step in range(steps)
                for i in range(transfers)
            ),
            links=graph.links,
            fixed_bytes=graph.fixed_bytes,
            limit_bytes=graph.limit_bytes,
        ),
        tuple(
            tuple(step * tasks + i for step in range(steps) for i in order)
            for order in schedule.orders
        ),
    )


def _later(task: Task, shift: int, step: int, batches: int) -> Task:
    batch = task.micro_batch + step * (batches if task.kind.is_per_micro_batch else 1)
    return replace(
        task,
        micro_batch=batch,
        after=tuple(i + shift for i in task.after),
        holds=tuple(
            Hold(h.bytes, tuple(i + shift for i in h.until)) for h in task.holds
        ),
    )


def _sent_later(transfer: Transfer, shift: int, of_transfers: int) -> Transfer:
    return replace(
        transfer,
        source=transfer.source + shift,
        targets=tuple(i + shift for i in transfer.targets),
        after=tuple(i + of_transfers for i in transfer.after),
    )
