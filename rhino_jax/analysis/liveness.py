"""When each value is live, and what of it is in memory at all (see `materialised`)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rhino_jax.analysis.graph import Graph, Node, NodeKind, Port
from rhino_jax.analysis.hoisting import Hoisted, find_hoisted
from rhino_jax.analysis.kernels import Kernels, find_kernels
from rhino_jax.analysis.masked_groups import Masked, Stays, find_masked
from rhino_jax.analysis.materialised import Fusing, find_materialised
from rhino_jax.analysis.matmul_depth import find_matmul_depth
from rhino_jax.analysis.slack import find_slack
from rhino_jax.analysis.uses import NOWHERE, copied_ports
from rhino_jax.analysis.views import are_views
from rhino_jax.solver.slack import Slack, Wait


@dataclass(frozen=True, slots=True, eq=False)
class Liveness:
    """Attributes:
    is_stored: [ports], whether a value is held there that touches memory.
    handed: see `Materialised`.
    kernels: what is read and launched once.
    slack: which collectives something waits for.
    hoisted: converted copies of what loops scan over.
    masked, stay: copies of operands masked to ragged groups, and those that stay from
        one product to another.
    copied: slice and stack nodes of loops whose values are copied out of and into
        the stack.
    first, last: [ports], when the value is live, both included.
    copy_last: [edges], until when a resharded copy of the value is live, from when it
        is read.
    """

    is_materialised: list[bool]
    handed: frozenset[int]
    kernels: Kernels
    slack: Slack
    hoisted: tuple[Hoisted, ...]
    masked: tuple[Masked, ...]
    stay: tuple[Stays, ...]
    copied: frozenset[int]
    first: list[int]
    last: list[int]
    copy_last: list[int]

    @property
    def is_held(self) -> list[bool]:
        """[ports], whether a value is in memory and nobody else counts it: who plans
        programs that hand each other values knows how long and how often each is."""
        stored = enumerate(self.is_materialised)
        return [is_it and port not in self.handed for port, is_it in stored]


def analyse(graph: Graph, fusing: Fusing) -> Liveness:
    """Decide what is stored, and for how long, before any sharding is chosen."""
    ports = _holding(graph)
    depth = find_matmul_depth(graph)
    fused = depth
    if fusing.parts_columns:
        fused = find_matmul_depth(graph, after_columns=True)
    found = find_materialised(graph, ports, fused, fusing)
    slack = find_slack(graph, depth)
    read = _read_until(graph, ports, found.ports, find_late(graph, slack))
    return Liveness(
        found.ports,
        found.handed,
        find_kernels(graph, fused, found),
        slack,
        find_hoisted(graph) if fusing.hoists_conversions else (),
        *(find_masked(graph) if fusing.masks_groups else ((), ())),
        _copied(graph),
        [_start(graph, port) for port in graph.ports],
        [_end(graph, port, read[port.id]) for port in graph.ports],
        _copies_until(graph, read),
    )


def _holding(graph: Graph) -> np.ndarray:
    """The ports that hold a value of some rank, or are read."""
    is_holding = np.zeros(len(graph.ports), dtype=bool)
    is_holding[[port.id for port in graph.held.values()]] = True
    # What a loop leaves of a carry is looked at where something reads it.
    carries = [n for n in graph.nodes if n.kind is NodeKind.CARRY]
    is_holding[[n.ports[-1].id for n in carries]] = False
    is_holding[graph.columns.source] = True
    return np.flatnonzero(is_holding)


def _read_until(
    graph: Graph, ports: np.ndarray, materialised: list[bool], late: dict[int, int]
) -> list[int]:
    """[ports], until when some reader needs the value, or when it is made.

    Args:
      graph: the program.
      ports: those that hold a value.
      materialised: [ports], whether it touches memory.
      late: when what is done late is.
    """
    nodes, columns = graph.nodes, graph.columns
    last = columns.time[columns.maker].tolist()
    # Of what runs where its result is read: when that is.
    runs: dict[int, int] = {}
    copied = copied_ports(graph).tolist()
    order = np.argsort(-columns.place[columns.maker[ports]], kind="stable")
    for port in ports[order].tolist():
        edges = graph.readers[port]
        if edges:
            # Donated arguments and carries are written in place, hardly anything else.
            holder = port if copied[port] == NOWHERE else copied[port]
            owned = nodes[graph.ports[holder].node].kind is not NodeKind.OP
            until = -1
            for edge in edges:
                target = nodes[edge.target]
                if target.is_fusible:
                    time = runs.get(edge.target, edge.time - owned)
                elif target.kind is NodeKind.OP:
                    time = late.get(edge.target, edge.time)
                elif target.kind is NodeKind.COPY:
                    time = last[target.ports[0].id]
                elif target.kind in (NodeKind.SLICE, NodeKind.CONST):
                    time = graph.loop_end[edge.target]
                else:
                    time = edge.time
                if time > until:
                    until = time
            last[port] = until
        maker = nodes[graph.ports[port].node]
        if maker.is_fusible and not materialised[port]:
            runs[maker.id] = max(runs.get(maker.id, -1), last[port])
    return last


def _copied(graph: Graph) -> frozenset[int]:
    """A slice with one reader is taken inside of it, and what only goes into a stack
    is written there; where others read it too, it is a value of its own."""
    is_view = are_views(graph)
    found = {
        node.id
        for node in graph.nodes
        if node.kind is NodeKind.SLICE
        and sum(not is_view[e.target] for e in graph.outgoing[node.id]) > 1
    }
    for edge in graph.edges:
        is_stack = graph.nodes[edge.target].kind is NodeKind.STACK
        if is_stack and len(graph.readers[edge.source.id]) > 1:
            found.add(edge.target)
    return frozenset(found)


def find_late(graph: Graph, slack: Slack) -> dict[int, int]:
    """When matmuls run that nothing waits for, as those of weights' gradients.

    Schedulers put what others wait for first: in a loop's body the rest runs at its
    end, before a loop it runs behind it (seen in HLO of scanned GPTs: XLA:GPU of jax
    0.10.2, libtpu 0.0.51).
    """
    loops = sorted({(graph.loop_start[n], graph.loop_end[n]) for n in graph.loop_end})
    found: dict[int, int] = {}
    for node in graph.nodes:
        if not node.is_matmul or slack.nodes[node.id] < Wait.LATER:
            continue
        around = [end for start, end in loops if start < node.time < end]
        if around:
            found[node.id] = min(around)
            continue
        needed = min((e.time for e in graph.outgoing[node.id]), default=graph.end)
        behind = [end for start, end in loops if node.time < start and end <= needed]
        if behind:
            found[node.id] = max(behind)
    return found


def _start(graph: Graph, port: Port) -> int:
    node = graph.nodes[port.node]
    # What a loop stacks up is allocated as a whole before the loop. One that runs once
    # is none to XLA (xla/service/while_loop_simplifier.cc).
    if node.kind is not NodeKind.STACK or _runs_once(node):
        return node.time
    return graph.loop_start[node.id]


def _runs_once(node: Node) -> bool:
    call = None if node.op is None else node.op.call
    return call is not None and call.trip_count == 1 and call.is_trip_count_known


def _end(graph: Graph, port: Port, last: int) -> int:
    node = graph.nodes[port.node]
    if node.kind is NodeKind.OP:
        return max(last, node.time)
    if node.kind is NodeKind.INPUT:
        entry = graph.program.inputs[node.slot]
        return last if entry.is_donated else graph.end
    if node.kind in (NodeKind.CARRY, NodeKind.STACK):
        return max(last, graph.loop_end[node.id])
    return max(last, node.time)


def _copies_until(graph: Graph, read: list[int]) -> list[int]:
    """[edges], until when a resharded copy is live.

    Args:
      graph: the program.
      read: [ports], until when a value is needed.
    """
    columns = graph.columns
    until = np.zeros(len(graph.nodes), dtype=np.int64)
    for node, end in graph.loop_end.items():
        if graph.nodes[node].kind in (NodeKind.SLICE, NodeKind.CONST):
            until[node] = end
    copies = np.flatnonzero(columns.is_copy[columns.maker])
    until[columns.maker[copies]] = np.array(read)[copies]
    return np.maximum(columns.read, until[columns.target]).tolist()
