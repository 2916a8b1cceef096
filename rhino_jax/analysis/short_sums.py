"""Short reductions that XLA:GPU computes inside of reductions over rows.

A reduction of fewer than `Observed.shortest_sum` elements is a loop of each thread. In
front of a reduction over rows, it is computed there: of distances between all pairs of
points, summed over coordinates and then over points, nothing is stored. The reductions
of all readers have to run in one kernel: a softmax reads its rows twice, a sum over
columns reads them in another order. In front of elementwise ops whose result `top_k` or
a product reads, it runs in their kernel.
Seen in HLO of h100, jax 0.10.2: kernel sums, nearest points, kernel regressions, of 2
to 15 coordinates and of 16 to 128.
"""

from __future__ import annotations

from rhino_jax.analysis.graph import Graph, Node, NodeKind, reached
from rhino_jax.analysis.matmul_depth import reduces_columns
from rhino_jax.hardware.lowering import OBSERVED
from rhino_jax.ir.traits import OpKind


def find_short_sums(graph: Graph) -> frozenset[int]:
    """Return the ids of short reductions that only reductions over rows read, through
    any number of fusible ops, or that one chain of fusible ops in front of a stored
    value does."""
    values, found = graph.program.values, set()
    for node in graph.nodes:
        op = node.op
        if not _reduces(node) or op is None or not values[node.value].rank:
            continue
        read, made = values[op.operands[0]].size, values[node.value].size
        if not made < read < OBSERVED.shortest_sum * made:
            continue
        if _runs_inside(graph, node) or _ends_stored(graph, node):
            found.add(node.id)
    return frozenset(found)


def _runs_inside(graph: Graph, node: Node) -> bool:
    """Whether one kernel of reductions over rows can compute all readers of a node."""
    nodes = graph.nodes

    def passes_on(n: int) -> bool:
        return nodes[n].is_fusible or nodes[n].kind is NodeKind.COPY

    def readers(n: int) -> set[int]:
        return {reader.id for reader in graph.nodes_behind(n)}

    between = reached([node.id], lambda n: filter(passes_on, readers(n)))
    ends = set[int]().union(*map(readers, between)) - between
    if not all(_reduces(nodes[n]) and not reduces_columns(nodes[n]) for n in ends):
        return False
    behind = reached(ends, lambda n: (r for r in readers(n) if nodes[r].is_fusible))
    return bool(ends) and all(readers(n).isdisjoint(between | ends) for n in behind)


def _ends_stored(graph: Graph, node: Node) -> bool:
    """Whether one fusible op after the other reads a node, the last of which has its
    result stored: no reader of that fuses."""
    readers = graph.nodes_behind(node.id)
    if len(readers) != 1 or not readers[0].is_fusible:
        return False
    while len(readers) == 1 and readers[0].is_fusible:
        readers = graph.nodes_behind(readers[0].id)
    return bool(readers) and not any(n.is_fused for n in readers)


def _reduces(node: Node) -> bool:
    return node.is_fused and node.op_kind is OpKind.REDUCTION
