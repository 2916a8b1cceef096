"""Random graphs of tasks, and their times by counting ticks: slow, and plain to see."""

from __future__ import annotations

import numpy as np

from rhino_jax.pipeline.tasks import (
    Hold,
    Schedule,
    Task,
    TaskGraph,
    TaskKind,
    Transfer,
    TransferLink,
)


def random_schedule(seed: int, count: int = 24) -> Schedule:
    """Tasks in whole ticks that read earlier ones, over links that groups share."""
    rng = np.random.default_rng(seed)
    groups = int(rng.integers(1, 5))
    links = tuple(TransferLink(f"link {i}") for i in range(int(rng.integers(1, 4))))
    group_of = rng.integers(groups, size=count)
    tasks: list[Task] = []
    transfers: list[Transfer] = []
    for i in range(count):
        group = int(group_of[i])
        earlier = rng.choice(i, min(i, int(rng.integers(0, 4))), replace=False)
        after = tuple(int(j) for j in earlier if tasks[j].group == group)
        later = int(rng.choice(i + np.flatnonzero(group_of[i:] == group)))
        tasks.append(
            Task(
                kind=TaskKind.FORWARD,
                group=group,
                chunk=group,
                micro_batch=i,
                seconds=float(rng.integers(1, 6)),
                working_bytes=int(rng.integers(0, 5)),
                holds=(Hold(int(rng.integers(0, 9)), (later,)),) if i % 2 else (),
                after=after,
            )
        )
        transfers += [
            Transfer(
                source=int(j),
                targets=(i,),
                link=int(rng.integers(len(links))),
                bytes=int(rng.integers(0, 9)),
                seconds=float(rng.integers(1, 4)),
            )
            for j in earlier
            if tasks[j].group != group
        ]
    graph = TaskGraph(groups, tuple(tasks), tuple(transfers), links)
    orders = tuple(
        tuple(i for i in range(count) if tasks[i].group == g) for g in range(groups)
    )
    return Schedule("random", graph, orders)


def by_ticks(schedule: Schedule, most: int = 2000) -> tuple[list, list] | None:
    """Starts of all tasks and transfers; None where not all of them ever start."""
    graph = schedule.graph
    start: list[int | None] = [None] * len(graph.tasks)
    sent: list[int | None] = [None] * len(graph.transfers)
    queues: list[list[int]] = [[] for _ in graph.links]

    def ended(i: int, now: int) -> bool:
        begun = start[i]
        return begun is not None and begun + graph.tasks[i].seconds <= now

    def arrived(t: int, now: int) -> bool:
        begun = sent[t]
        return begun is not None and begun + graph.transfers[t].seconds <= now

    def may_start(group: int, now: int) -> int | None:
        for i in schedule.orders[group]:
            if start[i] is None:
                is_there = all(ended(j, now) for j in graph.tasks[i].after)
                is_there &= all(arrived(t, now) for t in graph.transfers_to(i))
                return i if is_there else None
            if not ended(i, now):
                return None
        return None

    def set_out(link: int, now: int) -> None:
        mine = [t for t, x in enumerate(graph.transfers) if x.link == link]
        is_busy = any(sent[t] is not None and not arrived(t, now) for t in mine)
        if queues[link] and not is_busy:
            sent[queues[link].pop(0)] = now

    queued = [False] * len(graph.transfers)
    of_source = [
        [t for t, x in enumerate(graph.transfers) if x.source == i]
        for i in range(len(graph.tasks))
    ]
    for now in range(most):
        for i in range(len(graph.tasks)):
            for t in of_source[i] if ended(i, now) else ():
                if not queued[t]:
                    queued[t] = True
                    queues[graph.transfers[t].link].append(t)
        for group in range(graph.groups):
            if (i := may_start(group, now)) is not None:
                start[i] = now
        for link in range(len(graph.links)):
            set_out(link, now)
        if None not in start:
            return start, sent
    return None


def most_held(schedule: Schedule, start: list, sent: list) -> list[int]:
    """Peak of every group, by looking at every tick."""
    graph = schedule.graph
    end = [s + t.seconds for s, t in zip(start, graph.tasks, strict=True)]
    peaks = [0] * graph.groups
    for now in range(int(max(end))):
        held = [0] * graph.groups
        for i, task in enumerate(graph.tasks):
            if start[i] <= now < end[i]:
                held[task.group] += task.working_bytes
            for hold in task.holds:
                if start[i] <= now < max(end[u] for u in hold.until):
                    held[task.group] += hold.bytes
        for t, transfer in enumerate(graph.transfers):
            reader = transfer.targets[0]
            if sent[t] is not None and sent[t] <= now < start[reader]:
                held[graph.tasks[reader].group] += transfer.bytes
        peaks = [max(a, b) for a, b in zip(peaks, held, strict=True)]
    return peaks
