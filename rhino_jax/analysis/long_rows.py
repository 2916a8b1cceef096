"""Rows of softmaxes that a matmul's fusion holds, and those that it cannot hold."""

from __future__ import annotations

from collections.abc import Sequence

from rhino_jax.analysis.graph import Graph, Node
from rhino_jax.analysis.row_kernels import row_size
from rhino_jax.analysis.uses import Readers
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
      readers: the readers of every port.
      feeds: [nodes], ids of the ports that each reads.
    """
    nodes = graph.nodes

    def behind(node: Node) -> list[Node]:
        return [nodes[n] for n in readers.of_port(node.ports[0].id)]

    def is_long(node: Node) -> bool:
        assert node.op is not None
        shape = graph.program.values[node.op.results[0]].shape
        return bool(shape) and shape[-1] > OBSERVED.longest_row

    exponentials = (n for n in nodes if n.op_kind is OpKind.EXPONENTIAL)
    todo = [
        n.id
        for n in exponentials
        if is_long(n) and any(reduces_by("sum", r) for r in behind(n))
    ]
    found = set(todo)
    while todo:
        node = nodes[todo.pop()]
        if node.hosts_fusion:
            continue
        near = [nodes[graph.ports[p].node] for p in feeds[node.id]]
        for other in [*near, *(n for n in behind(node) if not n.hosts_fusion)]:
            is_of_it = other.is_fusible or other.hosts_fusion
            if is_of_it and other.id not in found and is_long(other):
                found.add(other.id)
                todo.append(other.id)
    return found


def is_row_maximum(node: Node, graph: Graph) -> bool:
    """Whether a node is the maximum of rows that a matmul's fusion holds."""
    is_held = 0 < row_size(node, graph) <= OBSERVED.longest_row
    return is_held and reduces_by("max", node)


def reduces_by(reducer: str, node: Node) -> bool:
    """Whether a node is a reduction of this kind over dims."""
    rule = node.reduction
    return rule is not None and any(f.reducer == reducer for f in rule.factors)
