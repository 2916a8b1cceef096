"""Minimum cut of a directed graph, by OR-tools' maximum flow."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ortools.graph.python import max_flow


_TOTAL = 2**44
"""Sum of all finite capacities, as integers: less than one is a rounding error."""


@dataclass(slots=True)
class FlowNetwork:
    """A flow network: nodes 0 (source), 1 (sink), 2, …, and edges.

    Attributes:
      nodes: number of nodes.
      edges: (tail, head, capacity in seconds) of each edge.
    """

    nodes: int = 2
    edges: list[tuple[int, int, float]] = field(default_factory=list)

    def node(self) -> int:
        """Add a node and return its number."""
        self.nodes += 1
        return self.nodes - 1

    def edge(self, tail: int, head: int, capacity: float = math.inf) -> None:
        """Add an edge; nodes that infinite capacity joins are not cut apart."""
        self.edges.append((tail, head, capacity))

    def cut(self) -> list[bool]:
        """Return for each node whether it is on the source's side of the minimum cut.

        Of several minimum cuts, it is the one with the fewest nodes on that side.

        Raises:
          ValueError: a path of infinite capacity leads from the source to the sink.
        """
        total = sum(c for *_, c in self.edges if math.isfinite(c)) or 1.0
        infinite = _TOTAL + len(self.edges)  # more than all others, which are rounded
        flow = max_flow.SimpleMaxFlow()
        for tail, head, c in self.edges:
            is_finite = math.isfinite(c)
            capacity = round(c / total * _TOTAL) if is_finite else infinite
            flow.add_arc_with_capacity(tail, head, capacity)
        if not self.edges or flow.num_nodes() < 2:
            return [node == 0 for node in range(self.nodes)]
        flow.solve(0, 1)
        if flow.optimal_flow() >= infinite:
            raise ValueError("the source reaches the sink at no cost")
        side = {0, *flow.get_source_side_min_cut()}
        return [node in side for node in range(self.nodes)]
