"""Shared copies: one resharded copy for several readers of a value.

XLA merges equal reshards of one value in one computation. Readers that do not fuse read
through a copy node that may reshard once for all of them. Where fusible readers may
need the same layout, they and that node read through a further node in front, which may
reshard for all of them, or leave it to each.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence, Set as AbstractSet

from rhino_jax.analysis.graph import Edge, Graph, Node, NodeKind, Port
from rhino_jax.ir.factor import FactorKind, Layout, Rule


def share_copies(graph: Graph) -> None:
    """Insert the copy nodes through which values with several readers are read."""
    by_source: dict[tuple[Port, int, int], list[Edge]] = defaultdict(list)
    for edge in graph.edges:
        if graph.nodes[edge.target].kind is NodeKind.OP:
            by_source[edge.source, edge.count, edge.part].append(edge)
    tied = {output.state_of for output in graph.program.outputs}
    for (port, _, _), edges in by_source.items():
        if len(edges) < 2:
            continue
        heavy = [e for e in edges if _is_heavy(graph.nodes[e.target])]
        light = _light(graph, port, edges, tied)
        if light and _num_readers(heavy + light) > 1:
            heavy_or_light = {id(e) for e in (*heavy, *light)}
            front = _copy_for(graph, [e for e in edges if id(e) in heavy_or_light])
            graph.fronts.add(front.id)
        if _num_readers(heavy) > 1:
            _copy_for(graph, heavy)


def _is_heavy(reader: Node) -> bool:
    """Whether a reader does not fuse, or reverses a kernel for a convolution's
    gradient."""
    assert reader.op is not None
    return reader.op.traits.is_reversal or not reader.is_fusible


def _light(
    graph: Graph, port: Port, edges: Sequence[Edge], tied: AbstractSet[int | None]
) -> list[Edge]:
    """Return the fusible readers that may need a layout that other readers need too,
    and that the producer does not give.

    Most ops can produce any layout: where readers agree on one, the value is produced
    in it. Inputs of the program come in the user's layout. Of the readers, those that
    need a dim unsharded may agree, and the others with the operands next to them; but a
    value that is carried or updated is read as it is held by fusible ops.

    Args:
      graph: the program.
      port: holds a value.
      edges: the ops that read it.
      tied: slots of inputs that are fed back.
    """
    maker = graph.nodes[port.node]
    # A slice is fused into its readers (see `Liveness.copied`).
    if maker.kind is NodeKind.SLICE or _gives_any(maker, port.result):
        return []
    light = [e for e in edges if not _is_heavy(graph.nodes[e.target])]
    needing = [e for e in light if _may_need_whole(graph, e)]
    is_held = maker.kind in (NodeKind.CARRY, NodeKind.CONST)
    if is_held or (maker.kind is NodeKind.INPUT and maker.slot in tied):
        return needing
    return light if needing or len(light) < len(edges) else []


def _gives_any(maker: Node, result: int) -> bool:
    """Whether an op can produce a result in any layout."""
    rule = maker.rule
    return rule is not None and not _has_whole(rule, rule.results[result])


def _may_need_whole(graph: Graph, edge: Edge) -> bool:
    """Whether a reader needs a dim of more than one element unsharded, or reads or
    writes it in steps: shards may then be sent more than borders."""
    rule = graph.nodes[edge.target].rule
    assert rule is not None
    layout = rule.operands[edge.operand]
    shifts = [f for x in layout for y in x if (f := rule.factors[y]).shift is not None]
    is_stepped = any(f.stride > 1 or f.dilation > 1 for f in shifts)
    return is_stepped or _has_whole(rule, layout)


def _has_whole(rule: Rule, layout: Layout) -> bool:
    factors = [rule.factors[f] for dim in layout for f in dim]
    return any(f.kind is FactorKind.WHOLE and f.size > 1 for f in factors)


def _num_readers(edges: Sequence[Edge]) -> int:
    return len({e.target for e in edges})


def _copy_for(graph: Graph, edges: Sequence[Edge]) -> Node:
    """Insert a copy node through which the given edges of one value read it."""
    first = min(edges, key=lambda e: e.time)
    port, count, time = first.source, first.count, first.time
    node = graph.add(NodeKind.COPY, count, time, None, 0, first.value)
    graph.edges.append(Edge(port, node.id, 0, first.value, count, time))
    for edge in edges:
        edge.source = node.ports[0]
    return node
