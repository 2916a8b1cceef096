"""Softmaxes whose scores are stored, in place of their exponentials.

XLA:TPU stores the result of the product before a softmax, with the maxima of its rows,
and computes everything between it and the next product in each kernel that reads it:

- where rows are longer than a product's fusion can hold (`Observed.longest_row`);
- where the maxima are those of an array of 2-byte elements, whether the softmax
  converts it to float32 afterwards or not;
- where the product's result is transposed before, as of grouped queries.

Seen in HLO of attention over 512 to 4,096 positions with its gradients, with and
without a mask and scales (v5e:2x2, libtpu 0.0.52). Two forward passes alone are not so:
of transposed scores, and of a softmax of a bfloat16 product as it is.
"""

from __future__ import annotations

from collections.abc import Sequence

from rhino_jax.analysis.graph import Graph, Node
from rhino_jax.analysis.uses import Readers, sums
from rhino_jax.hardware.lowering import OBSERVED
from rhino_jax.ir.program import item_bytes
from rhino_jax.ir.traits import OpKind


def find_stored_scores(
    graph: Graph, readers: Readers, feeds: Sequence[Sequence[int]]
) -> set[int]:
    """Return the ids of the nodes of such softmaxes: from every exponential whose rows
    a sum reads, in both directions through fusible nodes with rows as long, or as many
    elements, to the matmuls before.

    Args:
      graph: the program.
      readers: of all ports.
      feeds: [nodes], ids of the ports that each reads.
    """
    nodes, found = graph.nodes, set[int]()
    for root in nodes:
        if root.id in found or not _is_of_softmax(graph, readers, root):
            continue
        row, size, todo = _row(graph, root), _size(graph, root), [root.id]
        if row <= OBSERVED.longest_row and not _is_narrow(graph, feeds, root):
            continue
        found.add(root.id)
        while todo:
            node = nodes[todo.pop()]
            if node.hosts_fusion:
                continue
            before = [nodes[graph.ports[p].node] for p in feeds[node.id]]
            behind = [nodes[n] for n in readers.of_port(node.ports[0].id)]
            for other in [*before, *(n for n in behind if not n.hosts_fusion)]:
                is_of_it = other.is_fusible or other.hosts_fusion
                if not is_of_it or other.id in found:
                    continue
                if _row(graph, other) >= row or _size(graph, other) >= size:
                    found.add(other.id)
                    todo.append(other.id)
    return found


def _is_of_softmax(graph: Graph, readers: Readers, node: Node) -> bool:
    """Whether a node is an exponential whose rows a sum reads, perhaps converted."""
    if node.op_kind is not OpKind.EXPONENTIAL:
        return False
    read = [graph.nodes[n] for n in readers.of_port(node.ports[0].id)]
    for n in read:
        if n.op_kind is OpKind.CONVERSION:
            read += [graph.nodes[m] for m in readers.of_port(n.ports[0].id)]
    return any(map(sums, read))


def _is_narrow(graph: Graph, feeds: Sequence[Sequence[int]], node: Node) -> bool:
    """Whether the maxima of a softmax's rows are those of 2-byte elements, or its
    product's result is transposed before."""
    row, values = _row(graph, node), graph.program.values

    def before(node: Node) -> list[Node]:
        """Return the makers of operands with rows as long."""
        makers = (graph.nodes[graph.ports[p].node] for p in feeds[node.id])
        return [n for n in makers if n.op is not None and _row(graph, n) == row]

    # The maxima are subtracted from their array, which may have been converted.
    todo = [n for difference in before(node)[:1] for n in before(difference)[:1]]
    is_maximised = True
    for _ in range(OBSERVED.most_followed):
        if not todo:
            return False
        at = todo.pop()
        assert at.op is not None
        dtype = values[at.value].dtype
        if is_maximised and item_bytes(dtype) < item_bytes("float32"):
            return True
        is_maximised &= at.op_kind is OpKind.CONVERSION
        if at.op.name == "transpose":
            return True
        todo += before(at) if at.is_fusible else []
    return False


def _row(graph: Graph, node: Node) -> int:
    """Return the size of the last dim of an op's result; 0 for a scalar."""
    shape = graph.program.values[node.value].shape
    return shape[-1] if shape else 0


def _size(graph: Graph, node: Node) -> int:
    return graph.program.values[node.value].size
