"""Conversions of the stacks that a loop scans over, hoisted out of the loop.

XLA:TPU converts stacked float32 weights to bfloat16 once, before the first loop that
reads them in bfloat16, and keeps the result live until the last: seen in compiled HLO,
libtpu 0.0.51, GPT 1.3B with scanned layers. XLA:GPU converts each slice in the loop
(jax 0.10.2, GPT 7B).
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

from rhino_jax.analysis.graph import Edge, Graph, Node, NodeKind, Port
from rhino_jax.ir.program import item_bytes
from rhino_jax.ir.traits import OpKind


@dataclass(frozen=True, slots=True)
class Hoisted:
    """A converted copy of a whole stack.

    Attributes:
      node: id of the first loop's slice node; the copy is sharded as its operand.
      whole_bytes: bytes of the unsharded copy.
      start, stop: when it is live, both included.
    """

    node: int
    whole_bytes: int
    start: int
    stop: int


def find_hoisted(graph: Graph) -> tuple[Hoisted, ...]:
    """Return the converted copies of stacks that XLA makes for a program's loops."""
    loops: dict[Port, list[tuple[Edge, int]]] = defaultdict(list)
    for edge in graph.edges:
        node = graph.nodes[edge.target]
        if node.kind is NodeKind.SLICE:
            narrow = _narrowed(graph, node, graph.outgoing[node.id])
            if narrow is not None:
                loops[edge.source].append((edge, narrow))
    found = []
    for reading in loops.values():
        first, narrow = min(reading, key=lambda r: r[0].time)
        nodes = [edge.target for edge, _ in reading]
        whole = graph.program.values[first.value]
        found.append(
            Hoisted(
                node=first.target,
                whole_bytes=math.prod(whole.shape) * narrow,
                start=min(graph.loop_start[n] for n in nodes),
                stop=max(graph.loop_end[n] for n in nodes),
            )
        )
    return tuple(found)


def _narrowed(graph: Graph, node: Node, edges: list[Edge]) -> int | None:
    """Return the bytes per element after the conversions that read a slice; None where
    some other op reads it, or where they do not narrow it."""
    values = graph.program.values
    widths = set()
    for edge in edges:
        op = graph.nodes[edge.target].op
        if op is None or op.traits.kind is not OpKind.CONVERSION:
            return None
        widths.add(item_bytes(values[op.results[0]].dtype))
    if len(widths) != 1:
        return None
    width = widths.pop()
    return width if width < item_bytes(values[node.value].dtype) else None
