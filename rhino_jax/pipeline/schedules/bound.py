"""Lower bound on the time of any order of a graph's tasks."""

from __future__ import annotations

from rhino_jax.pipeline.tasks import TaskGraph


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
    missing = [len(t.after) + len(graph.incoming[i]) for i, t in enumerate(graph.tasks)]
    order = [i for i, count in enumerate(missing) if not count]
    for i in order:
        readers = list(graph.readers[i])
        readers += [r for t in graph.outgoing[i] for r in graph.transfers[t].targets]
        for reader in readers:
            missing[reader] -= 1
            if not missing[reader]:
                order.append(reader)
    return order
