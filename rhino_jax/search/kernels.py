"""Which ops run as one kernel, and so what is read from memory, and launched, once.

Elementwise ops of the same level that read or make each other's values are one fusion
after the compiler's producer, sibling and multi-output fusion; a reduction of what
they make or read belongs to it. An optimizer's update of one leaf reads its gradient,
moments and parameter once and writes three, whatever the number of its ops.

What a matmul lies between is of other levels (see `levels`), and cannot be one fusion.
"""

from __future__ import annotations

from dataclasses import dataclass

from rhino_jax.search.graph import Graph, Node, NodeKind, Port
from rhino_jax.search.levels import Levels
from rhino_jax.search.stored import Stored
from rhino_jax.solver.disjoint import DisjointSets


@dataclass(frozen=True, slots=True)
class Kernels:
    """Attributes:
    reads: node → its operands that are read from memory; in a fusion, the first of
        those that read the same value.
    launches: nodes that stand for a kernel of their own or for their fusion.
    """

    reads: dict[int, tuple[int, ...]]
    launches: frozenset[int]


def find_kernels(graph: Graph, levels: Levels, stored: Stored) -> Kernels:
    """Group the ops, and see what each group reads.

    Args:
      graph: the program.
      levels: of its nodes.
      stored: which values touch memory, and which ops run inside of a matmul.
    """
    nodes, matmul_of = graph.nodes, stored.matmul_of
    groups = DisjointSets(len(nodes))
    runs = _run_levels(graph, levels, stored.ports)
    for port, edges in graph.readers.items():
        first: dict[tuple[int, int | None], int] = {}
        for edge in edges:
            node = edge.target
            if not nodes[node].is_fused:
                continue
            # What is read in one level is read by one fusion, but by a matmul's.
            run = runs[node], matmul_of.get(node)
            other = first.setdefault(run, node)
            if other != node:
                groups.union(node, other)
        maker = port.node
        if first and nodes[maker].is_fusible:
            run = runs[maker], matmul_of.get(maker)
            if run in first:
                groups.union(maker, first[run])
    return _read(graph, groups, stored)


def _run_levels(graph: Graph, levels: Levels, is_stored: dict[Port, bool]) -> list[int]:
    """The level in which each node runs: one whose result is not stored runs where
    that is first read."""
    nodes, runs = graph.nodes, list(levels.at)
    for node in reversed(graph.run_order):
        if not node.is_fusible:
            continue
        port = Port(node.id, 0)
        if not is_stored.get(port, True):
            readers = (e.target for e in graph.readers.get(port, ()))
            runs[node.id] = min(
                (runs[n] for n in readers if nodes[n].is_fused), default=runs[node.id]
            )
    return runs


def _read(graph: Graph, groups: DisjointSets, stored: Stored) -> Kernels:
    reads: dict[int, tuple[int, ...]] = {}
    launches: set[int] = set()
    met: set[tuple[int, Port]] = set()
    started: set[int] = set()
    held = graph.held
    for node in graph.run_order:
        if node.kind is not NodeKind.OP or node.op is None:
            continue
        group = groups.find(node.id) if node.is_fused else -1 - node.id
        mine: list[int] = []
        for i, value in enumerate(node.op.operands):
            port = held.get(value)
            if port is None or not _is_read(graph, stored, port, node):
                continue
            if group < 0 or (group, port) not in met:
                met.add((group, port))
                mine.append(i)
        touches = bool(mine)
        if mine:
            reads[node.id] = tuple(mine)
        for i in range(len(node.op.results)):
            port = Port(node.id, i)
            touches = touches or stored.ports.get(port, False)
            met.add((group, port))
        if touches and group not in started:
            started.add(group)
            launches.add(node.id)
    return Kernels(reads, frozenset(launches))


def _is_read(graph: Graph, stored: Stored, port: Port, reader: Node) -> bool:
    """Whether the reader, or what a matmul computes again for it, reads memory."""
    if stored.ports.get(port, True):
        return True
    if not reader.is_matmul or not graph.nodes[port.node].is_fusible:
        return False
    return stored.matmul_of.get(port.node) != reader.id
