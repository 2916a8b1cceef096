"""Which values touch memory, and when each is live.

A fusible op's result goes through registers where one fusion can hold it and its
readers; it touches memory where an op that cannot fuse reads it, or where it leaves
a loop or the program. Read by several ops of another level (see `kernels`), it is
computed again by each reader's fusion where that is cheap and reads no more than it
would have stored (a convert, a mask, a normalisation); else it is kept. Some
compilers fuse elementwise operands into matmuls too (`Device.fuses_matmul_operands`);
what several matmuls read is then kept unless making it reads no more than it is.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

from rhino_jax.hardware.target import Device
from rhino_jax.search.graph import Edge, Graph, Node, NodeKind, Port
from rhino_jax.search.kernels import Kernels, find_kernels, levels_of
from rhino_jax.search.slack import Slack, find_slack


FUSES_OPERANDS = frozenset(
    {
        "reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and",
        "reduce_or", "argmax", "argmin", "dynamic_update_slice", "scatter-add",
        "scatter_add", "scatter", "concatenate", "pad",
    }
)  # fmt: skip
"""Ops that compute elementwise operands on the fly, as XLA's fusion does for
reductions, updates and copies (xla/service/instruction_fusion.cc)."""

EXPENSIVE = frozenset(
    {
        "exp", "exp2", "expm1", "log", "log1p", "logistic", "tanh", "erf", "erfc",
        "erf_inv", "lgamma", "digamma", "pow", "sin", "cos", "tan", "atan2", "sinh",
        "cosh", "asin", "acos", "atan", "cbrt", "random_bits", "threefry2x32",
    }
)  # fmt: skip
"""Elementwise ops that are not computed twice to save memory, after XLA's
`InstructionFusion::IsExpensive`, but for those that a target says it recomputes."""

MATMULS = frozenset({"dot_general", "conv_general_dilated"})

RECOMPUTE_SHARE = 1.1
"""A value is computed again only from at most this many times its own elements."""


@dataclass(frozen=True, slots=True)
class Fusing:
    """How a compiler fuses.

    Attributes:
      into: ops that compute elementwise operands on the fly.
      expensive: elementwise ops that are not computed twice.
    """

    into: frozenset[str] = FUSES_OPERANDS
    expensive: frozenset[str] = EXPENSIVE

    @classmethod
    def of(cls, device: Device) -> Fusing:
        into = FUSES_OPERANDS | (MATMULS if device.fuses_matmul_operands else set())
        return cls(into, EXPENSIVE - set(device.recomputes))


@dataclass(frozen=True, slots=True)
class Liveness:
    """Attributes:
    is_stored: port → whether its value touches memory.
    kernels: what is read and launched once.
    slack: which collectives something waits for.
    interval: port → (first, last) time, both included, at which it is live.
    edge_interval: for every edge, when a resharded copy of its value is live.
    """

    is_stored: dict[Port, bool]
    kernels: Kernels
    slack: Slack
    interval: dict[Port, tuple[int, int]]
    edge_interval: tuple[tuple[int, int], ...]


def is_fusible(node: Node) -> bool:
    return node.kind is NodeKind.OP and node.op is not None and node.op.is_fusible


def _readers_behind(
    graph: Graph, edges: list[Edge], readers: dict[Port, list[Edge]]
) -> list[Edge]:
    """The edges, with what reads a shared copy in place of the copy."""
    found: list[Edge] = []
    for edge in edges:
        is_copy = graph.nodes[edge.target].kind is NodeKind.COPY
        found += readers[Port(edge.target, 0)] if is_copy else [edge]
    return found


def _must_store(graph: Graph, edges: list[Edge], into: frozenset[str]) -> bool:
    """Whether some reader needs the value in memory."""
    for edge in edges:
        target = graph.nodes[edge.target]
        if target.kind is not NodeKind.OP:
            return True
        assert target.op is not None
        if not target.op.is_fusible and target.op.name not in into:
            return True
    return False


def _stored_ports(
    graph: Graph,
    ports: list[Port],
    readers: dict[Port, list[Edge]],
    levels: list[int],
    fusing: Fusing,
) -> dict[Port, bool]:
    """Decide for every port, in program order, whether its value is stored."""
    feeds: dict[int, list[Port]] = defaultdict(list)
    for edge in graph.edges:
        feeds[edge.target].append(edge.source)
    stored: dict[Port, bool] = {}
    sources: dict[Port, frozenset[Port]] = {}
    for port in sorted(ports, key=lambda p: (graph.nodes[p.node].time, p)):
        node = graph.nodes[port.node]
        edges = _readers_behind(graph, readers[port], readers)
        own = _size_of(graph, port)
        reads = frozenset[Port]().union(*(sources.get(p, {p}) for p in feeds[node.id]))
        keep = not is_fusible(node) or _must_store(graph, edges, fusing.into)
        if not keep and len(edges) > 1:
            assert node.op is not None
            is_far = max(levels[e.target] for e in edges) > levels[node.id]
            read = sum(_size_of(graph, p) for p in reads)
            reads_more = read > RECOMPUTE_SHARE * own
            matmuls = sum(_is_matmul(graph, e) for e in edges)
            is_dear = reads_more or node.op.name in fusing.expensive
            keep = (is_far and is_dear) or (matmuls > 1 and reads_more)
        stored[port] = keep
        sources[port] = frozenset({port}) if keep else reads
    return stored


def _is_matmul(graph: Graph, edge: Edge) -> bool:
    op = graph.nodes[edge.target].op
    return op is not None and op.name in MATMULS


def _size_of(graph: Graph, port: Port) -> int:
    node = graph.nodes[port.node]
    value = node.value
    if node.kind is NodeKind.OP:
        assert node.op is not None
        value = node.op.results[port.index]
    return math.prod(graph.program.values[value].shape)


def analyse(graph: Graph, fusing: Fusing) -> Liveness:
    """Decide what is stored, and for how long, before any sharding is chosen."""
    readers: dict[Port, list[Edge]] = defaultdict(list)
    for edge in graph.edges:
        readers[edge.source].append(edge)
    ports = _ports(graph, readers)
    levels = levels_of(graph, FUSES_OPERANDS)
    stored = _stored_ports(graph, ports, readers, levels, fusing)
    outs: dict[int, list[Port]] = defaultdict(list)
    for port in ports:
        outs[port.node].append(port)
    last: dict[Port, int] = {}
    for port in sorted(ports, key=lambda p: -graph.nodes[p.node].time):
        last[port] = max(
            (_read_until(graph, e, outs, stored, last) for e in readers[port]),
            default=graph.nodes[port.node].time,
        )
    interval = {
        port: (graph.nodes[port.node].time, _end(graph, port, last[port]))
        for port in ports
    }
    return Liveness(
        stored,
        find_kernels(graph, levels, stored, FUSES_OPERANDS),
        find_slack(graph, FUSES_OPERANDS),
        interval,
        tuple(_edge_interval(graph, e, last) for e in graph.edges),
    )


def _ports(graph: Graph, readers: dict[Port, list[Edge]]) -> list[Port]:
    ports = set(readers)
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
    return sorted(ports, key=lambda p: (p.node, p.index))


def _read_until(
    graph: Graph,
    edge: Edge,
    outs: dict[int, list[Port]],
    stored: dict[Port, bool],
    last: dict[Port, int],
) -> int:
    """Until when this reader needs the value."""
    target = graph.nodes[edge.target]
    if target.kind in (NodeKind.SLICE, NodeKind.CONST):
        return graph.loop_end[target.id]
    if target.kind is NodeKind.COPY:
        return max((last.get(p, edge.time) for p in outs[target.id]), default=edge.time)
    if is_fusible(target):
        later = [last.get(p, edge.time) for p in outs[target.id] if not stored[p]]
        # A fused reader runs where its own result is read, and may write in place.
        return max(later) if later else edge.time - 1
    return edge.time


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
