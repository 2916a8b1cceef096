"""Which collectives can run beside compute: those that nothing waits for.

A value has slack where other matmuls lie between the time at which it can be had and
the time at which it must be there: a weight that is gathered for a later layer, the
gradient of a weight that only the optimizer reads. What the next matmul waits for, as
the activations of tensor parallelism do, has none, and no compiler can hide it.

Levels are those of `kernels`: matmuls on the way. Inside of a loop's body, time ends
with the body.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from rhino_jax.search.graph import Edge, Graph, Node, NodeKind
from rhino_jax.search.kernels import is_heavy


@dataclass(frozen=True, slots=True)
class Slack:
    """Attributes:
    nodes: whether what a node does after its compute has slack, by node.
    edges: whether a reshard on an edge has, by edge.
    """

    nodes: tuple[bool, ...]
    edges: tuple[bool, ...]


_AT_END = (NodeKind.STACK, NodeKind.CARRY)


def find_slack(graph: Graph, levels: list[int], light: frozenset[str]) -> Slack:
    """Compare the first level at which each value is there with the last at which it
    must be.

    Args:
      graph: the program.
      levels: of its nodes.
      light: ops that fuse though they are not elementwise.
    """
    ends = _loop_ends(graph, levels)
    outgoing: dict[int, list[Edge]] = defaultdict(list)
    for edge in graph.edges:
        outgoing[edge.source.node].append(edge)

    def ready(node: Node) -> int:
        return levels[node.id] + is_heavy(node, light)

    deepest = max(map(ready, graph.nodes), default=0)
    latest = [deepest] * len(graph.nodes)

    def due(edge: Edge) -> int:
        """The level by which the reader needs the value."""
        target = graph.nodes[edge.target]
        is_back = target.kind in _AT_END and edge.time > target.time
        if target.kind is NodeKind.STACK or is_back:
            return ends[edge.target]
        return latest[edge.target]

    for node in reversed(graph.run_order):
        if node.kind is not NodeKind.OUTPUT:
            last = min((due(e) for e in outgoing[node.id]), default=deepest)
            latest[node.id] = max(last - is_heavy(node, light), levels[node.id])
    return Slack(
        tuple(
            all(due(e) > ready(node) for e in outgoing[node.id]) for node in graph.nodes
        ),
        tuple(due(e) > ready(graph.nodes[e.source.node]) for e in graph.edges),
    )


def _loop_ends(graph: Graph, levels: list[int]) -> dict[int, int]:
    """For every border node of a loop, the deepest level in the loop's body."""
    borders: dict[int, list[Node]] = defaultdict(list)
    for node in graph.nodes:
        if node.id in graph.loop_end and node.op is not None:
            borders[node.op.id].append(node)
    ends: dict[int, int] = {}
    for nodes in borders.values():
        start = min(n.time for n in nodes)
        end = max(graph.loop_end[n.id] for n in nodes)
        deepest = max(
            (levels[n.id] for n in graph.nodes if start < n.time < end), default=0
        )
        ends |= {n.id: max(deepest, levels[n.id]) for n in nodes}
    return ends
