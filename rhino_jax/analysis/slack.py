"""Slack: which collectives can overlap with compute, because nothing waits for them.

A value has slack where other matmuls run between the time at which it is available and
the time at which it is needed: a weight that is gathered for a later layer, the
gradient of a weight that only the optimizer reads. What the next matmul waits for, as
the activations of tensor parallelism, has none, and no compiler can hide it. What is
available when the step starts (a weight, and casts of it), and what is due when it ends
(the gradient that only the optimizer reads), is `FREE`: compilers start the one early,
let the other run on, and combine either with collectives of its kind.

A reduction to a scalar has the slack of what waits for the scalar: of the steps of
conjugate gradients, that wait for two dot products, none; of a global norm, what is
left when the last gradient is available.

Time is counted in matmuls (see `matmul_depth`). Inside a loop's body it ends with the
body, and nothing is free.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from rhino_jax.analysis.graph import Graph, Node, NodeKind
from rhino_jax.analysis.matmul_depth import MatmulDepth
from rhino_jax.hardware.lowering import OBSERVED
from rhino_jax.solver.overlap import Slack, Wait


COMBINED = (Wait.BACK, Wait.FREE)
"""The waits of collectives that compilers combine, where they do."""


def find_slack(graph: Graph, depth: MatmulDepth) -> Slack:
    """Return the slack of every node and edge: the levels between a value's
    availability and its use.

    Args:
      graph: the program.
      depth: of its nodes.
    """
    nodes, ready = graph.nodes, depth.behind
    scalar_dues = [0] * len(nodes)
    ends = _loop_ends(graph, depth)
    deepest = max(ready, default=0)
    # A value that closes a loop is due at the loop's end, any other when its reader is.
    closing = {
        id(edge): ends[node]
        for node in ends
        for edge in graph.incoming[node]
        if nodes[node].kind is NodeKind.STACK
        or (nodes[node].kind is NodeKind.CARRY and edge.time > nodes[node].time)
    }
    latest = _last_levels(graph, depth, deepest) + [deepest] * len(graph.scalars)
    for step in reversed(graph.steps):
        last = min([latest[step], *[latest[r] for r in graph.scalar_readers[step]]])
        latest[step] = last
        if step >= len(nodes) or nodes[step].kind is NodeKind.OUTPUT:
            continue
        scalar_dues[step] = last
        for edge in graph.outgoing[step]:
            due = closing.get(id(edge)) if closing else None
            if due is None:
                due = latest[edge.target]
            if due < last:
                last = due
        level = depth.at[step]
        latest[step] = max(last - (ready[step] - level), level)
    columns = graph.columns
    dues = np.array(latest)[columns.target]
    if closing:
        dues = [closing.get(id(e), d) for e, d in zip(graph.edges, dues, strict=True)]
    makers = columns.maker[columns.source]
    dues, readys = np.asarray(dues), np.array(ready)[makers]
    in_loops = np.array([n.count > 1 for n in nodes], dtype=bool)
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
    # The reader with the least slack counts for a node.
    by_node = np.full(len(nodes), Wait.FREE, dtype=np.int64)
    np.minimum.at(by_node, makers, waits)
    for node in nodes:
        due, is_read = scalar_dues[node.id], bool(graph.scalar_readers[node.id])
        if is_read or (in_loops[node.id] and not graph.outgoing[node.id]):
            is_free = due == deepest and not in_loops[node.id]
            late = Wait.FREE if is_free else Wait.LATER
            wait = Wait.NONE if due <= ready[node.id] else late
            by_node[node.id] = min(by_node[node.id], wait)
    return Slack(tuple(by_node.tolist()), tuple(waits.tolist()))


def _only_update(graph: Graph) -> np.ndarray:
    """Return [nodes], whether all that is computed from each is state that is fed back;
    False everywhere where the program feeds back only few values."""
    outputs = graph.program.outputs
    found = np.zeros(len(graph.nodes), dtype=bool)
    if sum(o.state_of is not None for o in outputs) < OBSERVED.least_state:
        return found
    # The node of an input reads the state that is fed back into it.
    inputs = {n.id for n in graph.nodes if n.kind is NodeKind.INPUT}
    for node in reversed(graph.run_order):
        targets = {e.target for e in graph.outgoing[node.id]}
        if targets and node.id not in inputs:
            found[node.id] = all(t in inputs or found[t] for t in targets)
    return found


def _last_levels(graph: Graph, depth: MatmulDepth, deepest: int) -> list[int]:
    """Return [nodes], the deepest level of the innermost loop that each is in, or of
    the program."""
    found = [deepest] * len(graph.nodes)
    for start, end in graph.loops:
        inside = [n.id for n in graph.nodes if start < n.time < end]
        last = max([depth.at[n] for n in inside], default=deepest)
        for n in inside:
            found[n] = last
    return found


def _loop_ends(graph: Graph, depth: MatmulDepth) -> dict[int, int]:
    """Return, for every border node of a loop, the deepest level in the loop's body."""
    borders: dict[int, list[Node]] = defaultdict(list)
    for node in graph.nodes:
        if node.id in graph.loop_end and node.op is not None:
            borders[node.op.id].append(node)
    ends: dict[int, int] = {}
    for nodes in borders.values():
        start = min(n.time for n in nodes)
        end = max(graph.loop_end[n.id] for n in nodes)
        deepest = max(
            (depth.at[n.id] for n in graph.nodes if start < n.time < end), default=0
        )
        ends |= {n.id: max(deepest, depth.at[n.id]) for n in nodes}
    return ends
