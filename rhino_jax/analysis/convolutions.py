"""Convolutions of cuDNN: the reversals that its gradient calls contain, and the zeros
that it multiplies with."""

from __future__ import annotations

from rhino_jax.analysis.graph import Graph
from rhino_jax.ir.traits import OpKind


KERNEL = 1
"""Position of the kernel among the operands of a convolution."""


def find_reversals(graph: Graph) -> frozenset[int]:
    """Return the ids of nodes that reverse a kernel for a single convolution, without
    groups: of several, XLA:GPU reverses it in a kernel of its own."""
    found = set()
    for node in graph.nodes:
        edges = graph.outgoing[node.id]
        if node.op is None or not node.op.traits.is_reversal or len(edges) != 1:
            continue
        reader = graph.nodes[edges[0].target].op
        if reader is None or reader.traits.kind is not OpKind.CONVOLUTION:
            continue
        if edges[0].operand == KERNEL and reader.traits.channels[-1] is None:
            found.add(node.id)
    return frozenset(found)


def find_zero_taps(graph: Graph) -> list[float]:
    """Return [nodes], the products of each convolution with zeros included over those
    that count (`Traits.zero_taps`): none for the gradient of a strided convolution by
    its input, which has a dilated input and a reversed kernel (`find_reversals`)."""
    found = [1.0 if n.op is None else n.op.traits.zero_taps for n in graph.nodes]
    for node in find_reversals(graph):
        (edge,) = graph.outgoing[node]
        op = graph.nodes[edge.target].op
        if op is not None and op.traits.input_dilation > 1:
            found[edge.target] = 1.0
    return found
