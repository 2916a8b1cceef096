"""Which ops run as one kernel, and so what is read from memory, and launched, once.

Elementwise ops of the same level that read or make each other's values are one fusion
after the compiler's producer, sibling and multi-output fusion; a reduction of what
they make or read belongs to it. An optimizer's update of one leaf reads its gradient,
moments and parameter once and writes three, whatever the number of its ops.

A level is the number of matmuls and other ops that cannot fuse on the longest way to
an op: what one of them lies between cannot be one fusion.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from rhino_jax.search.graph import Graph, Node, NodeKind, Port
from rhino_jax.search.stored import Stored, is_fusible, is_matmul
from rhino_jax.solver.disjoint import DisjointSets


@dataclass(frozen=True, slots=True)
class Kernels:
    """Attributes:
    reads: (node, operand) that are read from memory; in a fusion, the first of
        those that read the same value.
    launches: nodes that stand for a kernel of their own or for their fusion.
    """

    reads: frozenset[tuple[int, int]]
    launches: frozenset[int]


def levels_of(graph: Graph, light: frozenset[str]) -> list[int]:
    """The level of every node.

    Args:
      graph: the program.
      light: ops that fuse though they are not elementwise.
    """
    feeds: dict[int, list[int]] = defaultdict(list)
    for edge in graph.edges:
        feeds[edge.target].append(edge.source.node)
    levels = [0] * len(graph.nodes)
    for node in graph.run_order:
        if node.kind is not NodeKind.INPUT:
            levels[node.id] = max(
                (levels[n] + is_heavy(graph.nodes[n], light) for n in feeds[node.id]),
                default=0,
            )
    return levels


def is_heavy(node: Node, light: frozenset[str]) -> bool:
    """Whether what reads the node's result is of a deeper level."""
    if node.kind is not NodeKind.OP:
        return node.kind in (NodeKind.CARRY, NodeKind.STACK)
    assert node.op is not None
    return not node.op.is_fusible and node.op.name not in light


def find_kernels(
    graph: Graph, levels: list[int], stored: Stored, light: frozenset[str]
) -> Kernels:
    """Group the ops, and see what each group reads.

    Args:
      graph: the program.
      levels: of its nodes.
      stored: which values touch memory, and which ops run inside of a matmul.
      light: ops that fuse their operands.
    """
    groups = DisjointSets(len(graph.nodes))
    readers: dict[Port, list[int]] = defaultdict(list)
    for edge in graph.edges:
        if _is_fused(graph.nodes[edge.target], light):
            readers[edge.source].append(edge.target)
    runs = _run_levels(graph, levels, stored.ports, readers)
    for port, nodes in readers.items():
        first: dict[tuple[int, int | None], int] = {}
        for node in nodes:
            # What is read in one level is read by one fusion, but by a matmul's.
            run = runs[node], stored.matmul_of.get(node)
            groups.union(node, first.setdefault(run, node))
        maker = graph.nodes[port.node]
        run = runs[maker.id], stored.matmul_of.get(maker.id)
        if _is_fused(maker, frozenset()) and run in first:
            groups.union(maker.id, first[run])
    return _read(graph, groups, stored, light)


def _run_levels(
    graph: Graph,
    levels: list[int],
    is_stored: dict[Port, bool],
    readers: dict[Port, list[int]],
) -> list[int]:
    """The level in which each node runs: one whose result is not stored runs where
    that is first read."""
    runs = list(levels)
    for node in reversed(graph.run_order):
        port = Port(node.id, 0)
        if _is_fused(node, frozenset()) and not is_stored.get(port, True):
            runs[node.id] = min((runs[n] for n in readers[port]), default=runs[node.id])
    return runs


def _is_fused(node: Node, light: frozenset[str]) -> bool:
    if node.kind is not NodeKind.OP or node.op is None:
        return False
    return node.op.is_fusible or node.op.name in light


def _read(
    graph: Graph,
    groups: DisjointSets,
    stored: Stored,
    light: frozenset[str],
) -> Kernels:
    reads: set[tuple[int, int]] = set()
    launches: set[int] = set()
    met: set[tuple[int, Port]] = set()
    started: set[int] = set()
    for node in graph.run_order:
        if node.kind is not NodeKind.OP or node.op is None:
            continue
        group = groups.find(node.id) if _is_fused(node, light) else -1 - node.id
        results = [Port(node.id, i) for i in range(len(node.op.results))]
        touches = any(stored.ports.get(p, False) for p in results)
        for i, value in enumerate(node.op.operands):
            port = graph.held.get(value)
            if port is None or not _is_read(graph, stored, port, node):
                continue
            if group < 0 or (group, port) not in met:
                met.add((group, port))
                reads.add((node.id, i))
                touches = True
        met.update((group, p) for p in results)
        if touches and group not in started:
            started.add(group)
            launches.add(node.id)
    return Kernels(frozenset(reads), frozenset(launches))


def _is_read(graph: Graph, stored: Stored, port: Port, reader: Node) -> bool:
    """Whether the reader, or what a matmul computes again for it, reads memory."""
    if stored.ports.get(port, True):
        return True
    if not is_matmul(reader) or not is_fusible(graph.nodes[port.node]):
        return False
    return stored.matmul_of.get(port.node) != reader.id
