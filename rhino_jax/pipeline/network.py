"""A schedule as a dependency network: many samples of its durations at once."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from rhino_jax.pipeline.simulation import Simulation


@dataclass(frozen=True)
class TaskNetwork:
    """Dependencies of every task and transfer.

    A link carries its transfers in the same order as without noise. If several groups
    send over one link this is an approximation; if a single one does, it is the order
    in which that group computes them.

    Attributes:
      nodes: tasks, then transfers, in a topological order.
      ends: by node, the nodes that end before it starts.
      starts: by node, the nodes that start before it does: the reader that frees the
        buffer that a transfer needs.
      seconds: durations of all nodes without noise.
      groups: group of every task.
      links: link of every transfer.
    """

    nodes: tuple[int, ...]
    ends: tuple[tuple[int, ...], ...]
    starts: tuple[tuple[int, ...], ...]
    seconds: np.ndarray
    groups: np.ndarray
    links: np.ndarray

    def run(self, seconds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return start and end of every node.

        Args:
          seconds: durations of the nodes, in samples.

        Shapes:
          seconds, and both results: [nodes, samples]
        """
        start = np.zeros(seconds.shape)
        end = np.zeros(seconds.shape)
        for node in self.nodes:
            row = start[node]
            for other in self.ends[node]:
                np.maximum(row, end[other], out=row)
            for other in self.starts[node]:
                np.maximum(row, start[other], out=row)
            np.add(row, seconds[node], out=end[node])
        return start, end


def network_of(simulation: Simulation) -> TaskNetwork:
    """Return the dependencies of a simulated step."""
    graph = simulation.schedule.graph
    count = len(graph.tasks)
    ends: list[list[int]] = [
        [*task.after, *(count + i for i in graph.incoming[t])]
        for t, task in enumerate(graph.tasks)
    ]
    ends += [[t.source, *(count + i for i in t.after)] for t in graph.transfers]
    starts: list[list[int]] = [[] for _ in ends]
    for order in simulation.schedule.orders:
        for before, task in pairwise(order):
            ends[task].append(before)
    carried: list[list[int]] = [[] for _ in graph.links]
    readers: list[list[int]] = [[] for _ in graph.links]
    unread = [len(t.targets) for t in graph.transfers]
    for node in simulation.sequence:
        if node < count:
            for i in graph.incoming[node]:
                unread[i] -= 1
                if not unread[i]:
                    readers[graph.transfers[i].link].append(node)
            continue
        link = graph.transfers[node - count].link
        earlier, buffers = carried[link], graph.links[link].buffers
        ends[node] += earlier[-1:]
        if 0 < buffers <= len(earlier):
            starts[node].append(readers[link][len(earlier) - buffers])
        earlier.append(node)
    seconds = [t.seconds for t in graph.tasks] + [t.seconds for t in graph.transfers]
    return TaskNetwork(
        simulation.sequence,
        tuple(map(tuple, ends)),
        tuple(map(tuple, starts)),
        np.array(seconds, float),
        np.array([t.group for t in graph.tasks], int),
        np.array([t.link for t in graph.transfers], int),
    )
