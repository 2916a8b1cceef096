"""Operands of grouped matmuls (ragged dots), masked to the rows of every group.

XLA:GPU has no kernel for them. It writes one copy per group of an operand that has the
rows, zero outside the rows of the group, and multiplies all of it: seen in compiled HLO
of `jax.lax.ragged_dot` and of its gradients by rows and by matrices (h100, jax 0.10.2:
`ragged_dot_rewriter`), whose temporaries are these copies to the byte. The gradient by
rows also transposes the matrices, to contract their minor dim. XLA:TPU does not: its
kernel skips the tiles of other groups (`is_ragged_dot` and
`ITERATION_SKIPPER_MODE_GROUP_STARTS` in what libtpu 0.0.52 compiles).

Products that share an operand, as gate and up projection of an expert, read one copy.
The gradients by rows and by matrices read two, with different orders of dims, and are
scheduled together. A forward product and the gradient by matrices read one copy, which
stays live from the one to the other where both are sharded alike.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise

from rhino_jax.analysis.graph import Graph, Node


@dataclass(frozen=True, slots=True)
class Masked:
    """A masked temporary of a product.

    Attributes:
      node: id of the product; the temporary is sharded as its operand.
      operand: which operand of it.
      copies: size of the temporary, in multiples of the operand.
      start, stop: when it is live, both included.
    """

    node: int
    operand: int
    copies: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Stays:
    """A masked temporary that stays live between two products whose operands are
    sharded alike.

    Attributes:
      nodes, operands: ids of the two products, and which operand of each it is.
      copies, start, stop: as in `Masked`.
    """

    nodes: tuple[int, int]
    operands: tuple[int, int]
    copies: int
    start: int
    stop: int


def find_masked(graph: Graph) -> tuple[tuple[Masked, ...], tuple[Stays, ...]]:
    """Return the masked copies that a program's products read."""
    loops = sorted({(graph.loop_start[n], graph.loop_end[n]) for n in graph.loop_end})
    products: dict[tuple[tuple[int, int], ...], list[Node]] = defaultdict(list)
    for node in graph.nodes:
        if node.op is not None and node.op.traits.groups > 1:
            around = [loop for loop in loops if loop[0] < node.time < loop[1]]
            products[(*around[-1:],)].append(node)
    masked: list[Masked] = []
    stay: list[Stays] = []
    for nodes in products.values():
        _in_one_block(nodes, masked, stay)
    return tuple(masked), tuple(stay)


def _in_one_block(nodes: list[Node], masked: list[Masked], stay: list[Stays]) -> None:
    """Append the copies of products that no loop separates.

    Args:
      nodes: the products, in program order.
      masked, stay: extended in place.
    """
    place = {node.id: at for at, node in enumerate(nodes)}
    begin = {node.id: node.time for node in nodes}
    until = dict(begin)
    pairs = [pair for reading in _readers(nodes).values() for pair in pairwise(reading)]
    for (one, i), (other, j) in pairs:
        if i != j and place[other.id] == place[one.id] + 1:
            until[one.id] = max(until[one.id], other.time)
            begin[other.id] = min(begin[other.id], one.time)
    for (one, i), (other, j) in pairs:
        start, stop = until[one.id] + 1, begin[other.id] - 1
        if i == j and start <= stop:
            ends = (one.id, other.id), (i, j)
            stay.append(Stays(*ends, _copies(one), start, stop))
    for node in nodes:
        assert node.op is not None
        span = begin[node.id], until[node.id]
        for i in node.op.traits.masked:
            masked.append(Masked(node.id, i, _copies(node), *span))
        if node.op.traits.is_turned:
            masked.append(Masked(node.id, 1, 1, node.time, node.time))


def _readers(nodes: list[Node]) -> dict[tuple[int, ...], list[tuple[Node, int]]]:
    """Return (rows, group sizes), as value ids → products that read the rows masked,
    and as which operand."""
    found: dict[tuple[int, ...], list[tuple[Node, int]]] = defaultdict(list)
    for node in nodes:
        assert node.op is not None
        for i in node.op.traits.masked:
            found[node.op.operands[i], node.op.operands[2]].append((node, i))
    return found


def _copies(node: Node) -> int:
    assert node.op is not None
    return node.op.traits.groups
