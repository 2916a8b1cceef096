"""Which collectives can run beside compute: those that nothing waits for.

A value has slack where other matmuls lie between the time at which it can be had and
the time at which it must be there: a weight that is gathered for a later layer, the
gradient of a weight that only the optimizer reads. What the next matmul waits for, as
the activations of tensor parallelism do, has none, and no compiler can hide it.

Levels are matmuls on the way (see `levels`). Inside of a loop's body, time ends
with the body.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from rhino_jax.search.graph import Graph, Node, NodeKind
from rhino_jax.search.levels import Levels


@dataclass(frozen=True, slots=True)
class Slack:
    """Attributes:
    nodes: whether what a node does after its compute has slack, by node.
    edges: whether a reshard on an edge has, by edge.
    """

    nodes: tuple[bool, ...]
    edges: tuple[bool, ...]


def find_slack(graph: Graph, levels: Levels) -> Slack:
    """Compare the first level at which each value is there with the last at which it
    must be.

    Args:
      graph: the program.
      levels: of its nodes.
    """
    nodes, ready = graph.nodes, levels.behind
    ends = _loop_ends(graph, levels)
    deepest = max(ready, default=0)
    # What closes a loop is due where the loop ends, all else when its reader is.
    closing = {
        id(edge): ends[node]
        for node in ends
        for edge in graph.incoming[node]
        if nodes[node].kind is NodeKind.STACK
        or (nodes[node].kind is NodeKind.CARRY and edge.time > nodes[node].time)
    }
    latest = [deepest] * len(nodes)
    for node in reversed(graph.run_order):
        if node.kind is NodeKind.OUTPUT:
            continue
        last = deepest
        for edge in graph.outgoing[node.id]:
            due = closing.get(id(edge)) if closing else None
            if due is None:
                due = latest[edge.target]
            if due < last:
                last = due
        level = levels.at[node.id]
        latest[node.id] = max(last - (ready[node.id] - level), level)
    columns = graph.columns
    dues = np.array(latest)[columns.target]
    if closing:
        dues = [closing.get(id(e), d) for e, d in zip(graph.edges, dues, strict=True)]
    makers = columns.maker[columns.source]
    has_slack = np.asarray(dues) > np.array(ready)[makers]
    waits = np.zeros(len(nodes), dtype=bool)
    waits[makers[~has_slack]] = True
    return Slack(tuple((~waits).tolist()), tuple(has_slack.tolist()))


def _loop_ends(graph: Graph, levels: Levels) -> dict[int, int]:
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
            (levels.at[n.id] for n in graph.nodes if start < n.time < end), default=0
        )
        ends |= {n.id: max(deepest, levels.at[n.id]) for n in nodes}
    return ends
