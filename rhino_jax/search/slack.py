"""Which collectives can run beside compute: those that nothing waits for.

A value has slack where other matmuls lie between the time at which it can be had and
the time at which it must be there: a weight that is gathered for a later layer, the
gradient of a weight that only the optimizer reads. What the next matmul waits for, as
the activations of tensor parallelism do, has none, and no compiler can hide it.

What is ready when the step starts (a weight, and what is cast of it), and what is due
when it ends (the gradient that only the optimizer reads), is `FREE`: compilers start
the one early, let the other run on, and combine either with its like.

Levels are matmuls on the way (see `levels`). Inside of a loop's body, time ends
with the body, and nothing is free.
"""

from __future__ import annotations

import enum
from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from rhino_jax.search.graph import Graph, Node, NodeKind
from rhino_jax.search.levels import Levels


class Wait(enum.IntEnum):
    """What waits for a collective."""

    NONE = 0
    """The next matmul does: it has no slack."""
    BACK = 1
    """The end of the step: what was updated, on its way to where it is fed back."""
    UPDATE = 2
    """Its own update, beside which those of others run: the last gradients."""
    LATER = 3
    """A later matmul."""
    FREE = 4
    """None between the step's start and the reader, or the maker and the step's end."""


COMBINED = (Wait.BACK, Wait.FREE)
"""What compilers combine with its like, where they do."""


@dataclass(frozen=True, slots=True)
class Slack:
    """Attributes:
    nodes: the `Wait` for what a node does after its compute, by node.
    edges: that for a reshard on an edge, by edge.
    """

    nodes: tuple[int, ...]
    edges: tuple[int, ...]

    def where(self, hides_in_updates: bool) -> Slack:
        """The same in terms of NONE, BACK, LATER and FREE alone.

        Args:
          hides_in_updates: whether collectives run beside updates.
        """
        kinds = {w: w for w in Wait}
        kinds[Wait.BACK] = Wait.BACK if hides_in_updates else Wait.NONE
        kinds[Wait.UPDATE] = Wait.FREE if hides_in_updates else Wait.NONE
        table = [int(kinds[w]) for w in Wait]
        return Slack(
            tuple([table[w] for w in self.nodes]),
            tuple([table[w] for w in self.edges]),
        )


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
    dues, readys = np.asarray(dues), np.array(ready)[makers]
    in_loops = np.array([_is_in_loop(n) for n in nodes], dtype=bool)
    is_free = ((readys == 0) | (dues == deepest)) & ~in_loops[makers]
    is_free &= ~in_loops[columns.target]
    waits = np.where(is_free, Wait.FREE, Wait.LATER)
    waits[dues <= readys] = Wait.NONE
    updates = _only_update(graph)
    is_last = (waits == Wait.NONE) & (dues == deepest) & is_free
    waits[is_last & updates[columns.target]] = Wait.UPDATE
    is_input = np.array([n.kind is NodeKind.INPUT for n in nodes], dtype=bool)
    is_back = is_input[columns.target] & updates[makers]
    waits[(waits == Wait.NONE) & is_back] = Wait.BACK
    # Of a node's readers the one that waits most counts.
    by_node = np.full(len(nodes), Wait.FREE, dtype=np.int64)
    np.minimum.at(by_node, makers, waits)
    return Slack(tuple(by_node.tolist()), tuple(waits.tolist()))


def _only_update(graph: Graph) -> np.ndarray:
    """[nodes], whether all that comes of one is state that is fed back, one of several
    such inputs."""
    outputs = graph.program.outputs
    found = np.zeros(len(graph.nodes), dtype=bool)
    if sum(o.state_of is not None for o in outputs) < LEAST_STATE:
        return found
    # What is fed back is read by the node of its input.
    inputs = {n.id for n in graph.nodes if n.kind is NodeKind.INPUT}
    for node in reversed(graph.run_order):
        targets = {e.target for e in graph.outgoing[node.id]}
        if targets and node.id not in inputs:
            found[node.id] = all(t in inputs or found[t] for t in targets)
    return found


LEAST_STATE = 4
"""Arrays that are fed back, from which on updates run beside each other."""


def _is_in_loop(node: Node) -> bool:
    return node.count > 1


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
