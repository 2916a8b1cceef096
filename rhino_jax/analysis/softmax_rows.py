"""Softmaxes whose rows are longer than a matmul's fusion can hold."""

from __future__ import annotations

from collections.abc import Sequence

from rhino_jax.analysis.graph import Graph, Node
from rhino_jax.analysis.uses import Readers, sums
from rhino_jax.hardware.lowering import OBSERVED
from rhino_jax.ir.traits import OpKind


def find_long_rows(
    graph: Graph, readers: Readers, feeds: Sequence[Sequence[int]]
) -> set[int]:
    """Return the ids of the nodes of softmaxes with long rows: from every exponential
    whose rows a sum reads, in both directions through fusible nodes with rows as long,
    to the matmuls before.

    Args:
      graph: the program.
      readers: of all ports.
      feeds: [nodes], ids of the ports that each reads.
    """
    nodes = graph.nodes
    todo = [n.id for n in nodes if _is_long_softmax(graph, readers, n)]
    found = set(todo)
    while todo:
        node = nodes[todo.pop()]
        if node.hosts_fusion:
            continue
        before = [nodes[graph.ports[p].node] for p in feeds[node.id]]
        behind = [nodes[n] for n in readers.of_port(node.ports[0].id)]
        for other in [*before, *(n for n in behind if not n.hosts_fusion)]:
            is_of_it = other.is_fusible or other.hosts_fusion
            is_new = is_of_it and other.id not in found
            if is_new and _row(graph, other) > OBSERVED.longest_row:
                found.add(other.id)
                todo.append(other.id)
    return found


def _is_long_softmax(graph: Graph, readers: Readers, node: Node) -> bool:
    if node.op is None or node.op.traits.kind is not OpKind.EXPONENTIAL:
        return False
    if _row(graph, node) <= OBSERVED.longest_row:
        return False
    return any(sums(graph.nodes[n]) for n in readers.of_port(node.ports[0].id))


def _row(graph: Graph, node: Node) -> int:
    """Return the size of the last dim of an op's result; 0 for a scalar."""
    assert node.op is not None
    shape = graph.program.values[node.op.results[0]].shape
    return shape[-1] if shape else 0
