"""When each value is live, and what of it is in memory at all (see `stored`)."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from rhino_jax.search.graph import Edge, Graph, NodeKind, Port
from rhino_jax.search.hoisting import Hoisted, find_hoisted
from rhino_jax.search.kernels import Kernels, find_kernels
from rhino_jax.search.levels import find_levels
from rhino_jax.search.slack import Slack, find_slack
from rhino_jax.search.stored import Fusing, find_stored


@dataclass(frozen=True, slots=True)
class Liveness:
    """Attributes:
    is_stored: port → whether its value touches memory.
    kernels: what is read and launched once.
    slack: which collectives something waits for.
    hoisted: converted copies of what loops scan over.
    copied: slice and stack nodes of loops whose values are copied out of and into
        the stack.
    interval: port → (first, last) time, both included, at which it is live.
    edge_interval: for every edge, when a resharded copy of its value is live.
    """

    is_stored: dict[Port, bool]
    kernels: Kernels
    slack: Slack
    hoisted: tuple[Hoisted, ...]
    copied: frozenset[int]
    interval: dict[Port, tuple[int, int]]
    edge_interval: tuple[tuple[int, int], ...]


def analyse(graph: Graph, fusing: Fusing) -> Liveness:
    """Decide what is stored, and for how long, before any sharding is chosen."""
    ports = _ports(graph)
    levels = find_levels(graph)
    found = find_stored(graph, ports, levels, fusing)
    stored = found.ports
    slack = find_slack(graph, levels)
    late = find_late(graph, slack)
    outs: dict[int, list[Port]] = defaultdict(list)
    for port in ports:
        outs[port.node].append(port)
    last: dict[Port, int] = {}
    for port in sorted(ports, key=lambda p: -graph.nodes[p.node].time):
        last[port] = max(
            (
                _read_until(graph, e, outs, stored, last, late)
                for e in graph.readers.get(port, ())
            ),
            default=graph.nodes[port.node].time,
        )
    interval = {
        port: (_start(graph, port), _end(graph, port, last[port])) for port in ports
    }
    return Liveness(
        stored,
        find_kernels(graph, levels, found),
        slack,
        find_hoisted(graph) if fusing.hoists_conversions else (),
        _copied(graph),
        interval,
        tuple(_edge_interval(graph, e, last) for e in graph.edges),
    )


def _ports(graph: Graph) -> list[Port]:
    ports = set(graph.readers)
    for node in graph.nodes:
        if node.kind is NodeKind.OUTPUT:
            continue
        if node.kind is NodeKind.OP:
            assert node.op is not None
            for i, value in enumerate(node.op.results):
                if graph.program.values[value].rank:
                    ports.add(Port(node.id, i))
        elif graph.program.values[node.value].rank:
            ports.add(Port(node.id, 0))
    return sorted(ports)


def _read_until(
    graph: Graph,
    edge: Edge,
    outs: dict[int, list[Port]],
    stored: dict[Port, bool],
    last: dict[Port, int],
    late: dict[int, int],
) -> int:
    """Until when this reader needs the value."""
    target = graph.nodes[edge.target]
    if target.kind in (NodeKind.SLICE, NodeKind.CONST):
        return graph.loop_end[target.id]
    if target.kind is NodeKind.COPY:
        return max((last.get(p, edge.time) for p in outs[target.id]), default=edge.time)
    if target.is_fusible:
        later = [last.get(p, edge.time) for p in outs[target.id] if not stored[p]]
        # A fused reader runs where its own result is read.
        if later:
            return max(later)
        # Donated arguments and carries are written in place, hardly anything else.
        is_owned = graph.nodes[edge.source.node].kind is not NodeKind.OP
        return edge.time - 1 if is_owned else edge.time
    return late.get(target.id, edge.time)


def _copied(graph: Graph) -> frozenset[int]:
    """A slice with one reader is taken inside of it, and what only goes into a stack
    is written there; where others read it too, it is a value of its own."""
    found = {
        node.id
        for node in graph.nodes
        if node.kind is NodeKind.SLICE and len(graph.outgoing[node.id]) > 1
    }
    for edge in graph.edges:
        is_stack = graph.nodes[edge.target].kind is NodeKind.STACK
        if is_stack and len(graph.readers[edge.source]) > 1:
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
        if not node.is_matmul or not slack.nodes[node.id]:
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
    # What a loop stacks up is allocated as a whole before the loop.
    return graph.loop_start[node.id] if node.kind is NodeKind.STACK else node.time


def _end(graph: Graph, port: Port, last: int) -> int:
    node = graph.nodes[port.node]
    if node.kind is NodeKind.INPUT:
        entry = graph.program.inputs[node.slot]
        return last if entry.is_donated else graph.end
    if node.kind in (NodeKind.CARRY, NodeKind.STACK):
        return max(last, graph.loop_end[node.id])
    return max(last, node.time)


def _edge_interval(graph: Graph, edge: Edge, last: dict[Port, int]) -> tuple[int, int]:
    target = graph.nodes[edge.target]
    if target.kind in (NodeKind.SLICE, NodeKind.CONST):
        return edge.time, graph.loop_end[target.id]
    if target.kind is NodeKind.COPY:
        return edge.time, max(last.get(Port(target.id, 0), edge.time), edge.time)
    return edge.time, edge.time
