"""Reshapes that are none: a contracted dim parted into a batch dim and the rest.

So are the operands of products whose sum is left open (`transform.partial_sums`). The
batch dim is cut to single indices, which leaves the array as it was; no compiler moves
anything for it (v5e:2x2, v5e:2x4, 8 H100, CPU: no copy in HLO).
"""

from __future__ import annotations

import numpy as np

from rhino_jax.analysis.graph import Graph, Node
from rhino_jax.ir.traits import OpKind


def are_views(graph: Graph) -> np.ndarray:
    """[nodes], whether what a node makes is what it reads, to whatever reads it."""
    found = np.zeros(len(graph.nodes), dtype=bool)
    for edge in graph.edges:
        maker = graph.nodes[graph.ports[edge.source.id].node]
        if maker.op is None or maker.op.name != "reshape":
            continue
        found[maker.id] = len(graph.outgoing[maker.id]) == 1 and _parts(
            maker, graph.nodes[edge.target], edge.operand
        )
    return found


def _parts(reshape: Node, reader: Node, operand: int) -> bool:
    """Whether a product has as a batch dim all but the last part of what was parted,
    and sums over the last."""
    op, made = reader.op, reshape.op
    if op is None or op.rule is None or made is None or made.rule is None:
        return False
    if op.traits.kind is not OpKind.CONTRACTION or len(op.rule.operands) != 2:
        return False
    before, after = made.rule.operands[0], made.rule.results[0]
    if any(len(dim) > 1 for dim in after):
        return False
    rule, places = op.rule, {dim[0]: d for d, dim in enumerate(after) if dim}
    others = {f for dim in rule.operands[1 - operand] for f in dim}
    for dim in (dim for dim in before if len(dim) > 1):
        roles = [rule.operands[operand][places[f]] for f in dim if f in places]
        if len(roles) != len(dim) or not all(roles):
            return False
        shared = [
            role[0] in others and not rule.factors[role[0]].reducer for role in roles
        ]
        if not all(shared[:-1]) or rule.factors[roles[-1][0]].reducer != "sum":
            return False
    return any(len(dim) > 1 for dim in before)
