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

from rhino_jax.analysis.graph import Graph, Node, NodeKind
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
    between, ends, todo = {node.id}, set[int](), [node.id]
    while todo:
        for edge in graph.outgoing[todo.pop()]:
            reader = graph.nodes[edge.target]
            if reader.id in between or reader.id in ends:
                continue
            if reader.is_fusible or reader.kind is NodeKind.COPY:
                between.add(reader.id)
                todo.append(reader.id)
            elif _reduces(reader) and not reduces_columns(reader):
                ends.add(reader.id)
            else:
                return False
    todo, behind = list(ends), set(ends)
    while todo:
        for edge in graph.outgoing[todo.pop()]:
            reader = graph.nodes[edge.target]
            if reader.id in between or reader.id in ends:
                return False
            if reader.is_fusible and reader.id not in behind:
                behind.add(reader.id)
                todo.append(reader.id)
    return bool(ends)


def _ends_stored(graph: Graph, node: Node) -> bool:
    """Whether one fusible op after the other reads a node, the last of which has its
    result stored: no reader of that fuses."""
    readers = [graph.nodes[e.target] for e in graph.outgoing[node.id]]
    if len(readers) != 1 or not readers[0].is_fusible:
        return False
    while len(readers) == 1 and readers[0].is_fusible:
        readers = [graph.nodes[e.target] for e in graph.outgoing[readers[0].id]]
    return bool(readers) and not any(n.is_fused for n in readers)


def _reduces(node: Node) -> bool:
    return node.is_fused and node.op_kind is OpKind.REDUCTION
