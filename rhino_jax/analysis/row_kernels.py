"""Reductions over rows that XLA:GPU computes in one kernel with their readers.

A kernel of Triton holds whole rows, reduces them and reads the result. It starts from a
diamond: a binary op of rows with a reduction of the same rows, repeated along them
(`x - max(x)`), where each step between has one reader, and one operand that varies
along the row. What is computed of such rows before and behind is fused into the kernel,
other reductions of them included.
Of other rows, one kernel reduces and another reads them again: where two statistics of
the rows are combined (a variance from the mean of squares), or the backward pass reads
one of them, too (a normalisation that is trained).
Source: openxla/xla, xla/service/gpu/transforms/softmax_rewriter_triton.cc,
`MatchesTritonCompatibleClosedReductionDiamondImpl`; HLO of h100, jax 0.10.2:
normalisations and softmaxes, forward alone and trained.
"""

from __future__ import annotations

from rhino_jax.analysis.graph import Graph, Node, NodeKind
from rhino_jax.ir.traits import OpKind


def find_row_kernels(graph: Graph) -> frozenset[int]:
    """Return the ids of the reductions over rows that run in the kernel of their
    readers."""
    found = {n.id for n in graph.nodes if _is_diamond(graph, n)}
    sizes = {n: row_size(graph.nodes[n], graph) for n in found}
    todo, seen = list(found), set(found)
    while todo:
        here = todo.pop()
        for node in (*graph.nodes_behind(here), *graph.nodes_before(here)):
            is_reduction = row_size(node, graph) == sizes[here]
            if node.id in seen or not (node.is_fusible or is_reduction):
                continue
            seen.add(node.id)
            sizes[node.id] = sizes[here]
            todo.append(node.id)
            if is_reduction:
                found.add(node.id)
    return frozenset(found)


def row_size(node: Node, graph: Graph) -> int:
    """Return the number of elements that a reduction over the last dim reduces to one;
    0 for other nodes, and for rows of one element."""
    op, rule = node.op, node.rule
    if op is None or rule is None or node.op_kind is not OpKind.REDUCTION:
        return 0
    if not node.is_fused:
        return 0
    have, made = rule.operands[0], rule.results[0]
    is_row = bool(have) and list(made) == list(have[:-1])
    size = graph.program.values[op.operands[0]].shape[-1] if is_row else 0
    return size if size > 1 else 0


def _is_diamond(graph: Graph, node: Node) -> bool:
    """Whether a reduction over rows is one side of a diamond."""
    if not row_size(node, graph):
        return False
    here, is_repeated = node, False
    while True:
        if len(graph.outgoing[here.id]) != 1:
            return False
        (edge,) = graph.outgoing[here.id]
        reader = graph.nodes[edge.target]
        if not reader.is_fusible and reader.kind is not NodeKind.COPY:
            return False
        if len(_varying(graph, reader)) > 1:
            break
        is_repeated |= reader.op_kind is OpKind.BROADCAST
        here = reader
    if not is_repeated or edge.operand != 1:
        return False
    (rows,) = _varying(graph, node) or (None,)
    (start,) = graph.nodes_before(reader.id, operand=0) or (graph.nodes[0],)
    above = _above(graph, rows)
    return bool(above) and _above(graph, start)[-1] == above[-1]


def _above(graph: Graph, node: Node | None) -> list[int]:
    """Return a node, and those before it up to the first that has several readers, or
    several operands that vary."""
    found: list[int] = []
    while node is not None:
        found.append(node.id)
        is_trivial = node.is_fusible or node.kind is NodeKind.COPY
        varying = _varying(graph, node)
        if not is_trivial or len(graph.outgoing[node.id]) > 1 or len(varying) != 1:
            break
        node = varying[0]
    return found


def _varying(graph: Graph, node: Node) -> list[Node]:
    """Return the nodes that a node reads, each once, without broadcast scalars."""
    nodes = {n.id: n for n in graph.nodes_before(node.id)}.values()
    return [
        n for n in nodes if graph.incoming[n.id] or n.op_kind is not OpKind.BROADCAST
    ]
