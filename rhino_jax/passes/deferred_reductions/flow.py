"""Minimum cut of a small directed graph, by Dinic's algorithm.

Source: Dinic, "Algorithm for solution of a problem of maximum flow in networks with
power estimation", Soviet Mathematics Doklady 11 (1970).
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field


_SMALL = 1e-15
"""Capacities below this, in seconds, are rounding errors."""


@dataclass(slots=True)
class FlowNetwork:
    """A flow network: nodes 0 (source), 1 (sink), 2, …, and pairs of edges.

    Edge e of an even number runs forward, e + 1 is its reverse.

    Attributes:
      heads: node that each edge ends at.
      left: residual capacity of each edge, in seconds.
      out: edges that start at each node.
    """

    heads: list[int] = field(default_factory=list)
    left: list[float] = field(default_factory=list)
    out: list[list[int]] = field(default_factory=lambda: [[], []])

    def node(self) -> int:
        """Add a node and return its number."""
        self.out.append([])
        return len(self.out) - 1

    def edge(self, tail: int, head: int, capacity: float = math.inf) -> int:
        """Add an edge and return its number."""
        for a, b, c in ((tail, head, capacity), (head, tail, 0.0)):
            self.out[a].append(len(self.heads))
            self.heads.append(b)
            self.left.append(c)
        return len(self.heads) - 2

    def cut(self) -> list[bool]:
        """Return for each node whether it is on the source's side of the minimum cut.

        Of several minimum cuts, it is the one with the fewest nodes on that side.
        """
        while (levels := self._levels())[1] >= 0:
            tried = [0] * len(self.out)
            while self._push(levels, tried):
                pass
        return [level >= 0 for level in levels]

    def _levels(self) -> list[int]:
        """Return each node's distance in edges from the source; -1: unreachable."""
        levels = [-1] * len(self.out)
        levels[0] = 0
        queue = deque([0])
        while queue:
            node = queue.popleft()
            for e in self.out[node]:
                head = self.heads[e]
                if levels[head] < 0 and self.left[e] > _SMALL:
                    levels[head] = levels[node] + 1
                    queue.append(head)
        return levels

    def _push(self, levels: list[int], tried: list[int]) -> bool:
        """Push flow along one more shortest augmenting path.

        Args:
          levels: distance of each node from the source.
          tried: number of exhausted edges per node; updated by this.
        Returns:
          Whether there was such a path.
        Raises:
          ValueError: the path has infinite capacity.
        """
        path: list[int] = []
        node = 0
        while node != 1:
            edges = self.out[node]
            while tried[node] < len(edges):
                e = edges[tried[node]]
                head = self.heads[e]
                if self.left[e] > _SMALL and levels[head] == levels[node] + 1:
                    break
                tried[node] += 1
            if tried[node] < len(edges):
                path.append(edges[tried[node]])
                node = self.heads[path[-1]]
            elif not path:
                return False
            else:
                node = self.heads[path.pop() ^ 1]
                tried[node] += 1
        taken = min(self.left[e] for e in path)
        if math.isinf(taken):
            raise ValueError("the source reaches the sink at no cost")
        for e in path:
            self.left[e] -= taken
            self.left[e ^ 1] += taken
        return True
