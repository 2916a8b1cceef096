"""Views: reshapes that move nothing, since every device holds a single index of a new
dim.

The operands of ops with a deferred reduction (`passes.deferred_reductions`) are views:
for products, a contracted dim split into a batch dim and the rest; for convolutions, a
dim split into groups. The new dim is sharded to single indices, which leaves the array
as it was; no compiler moves anything for it (v5e:2x2, v5e:2x4, 8 H100, CPU: no copy in
HLO).
"""

from __future__ import annotations

import numpy as np

from rhino_jax.analysis.graph import Graph, Node
from rhino_jax.ir.factor import Rule
from rhino_jax.ir.traits import OpKind


def are_views(graph: Graph) -> np.ndarray:
    """Return [nodes], whether each is a view, so that its reader reads its operand."""
    found = np.zeros(len(graph.nodes), dtype=bool)
    for node in reversed(graph.nodes):
        readers = graph.outgoing[node.id]
        if node.op is None or node.op.name != "reshape" or len(readers) != 1:
            continue
        (edge,) = readers
        reader = graph.nodes[edge.target]
        found[node.id] = (
            _parts(node, reader, edge.operand)
            or _groups(node, reader, edge.operand)
            or (bool(found[reader.id]) and _splits(node, reader))
        )
    return found


def _parts(reshape: Node, reader: Node, operand: int) -> bool:
    """Whether, of the dim that a reshape splits, a product has all parts but the last
    as batch dims, and contracts the last."""
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
        shared = [r[0] in others and not rule.factors[r[0]].reducer for r in roles]
        if not all(shared[:-1]) or rule.factors[roles[-1][0]].reducer != "sum":
            return False
    return any(len(dim) > 1 for dim in before)


def _groups(reshape: Node, reader: Node, operand: int) -> bool:
    """Whether a convolution has, as its groups, a dim that a reshape merged into
    another."""
    op, made = reader.op, reshape.op
    if op is None or op.rule is None or made is None or made.rule is None:
        return False
    if op.traits.kind is not OpKind.CONVOLUTION:
        return False
    pairs = zip(made.rule.results[0], op.rule.operands[operand], strict=True)
    merged = [(dim, read) for dim, read in pairs if len(dim) > 1]
    return len(merged) == 1 and all(
        len(dim) == len(read) == 2
        and _sizes(made.rule, dim) == _sizes(op.rule, read)
        and (dim[0],) in made.rule.operands[0]
        for dim, read in merged
    )


def _splits(reshape: Node, view: Node) -> bool:
    """Whether a reshape splits one dim, and a view behind it merges its first part
    elsewhere."""
    made, behind = reshape.op, view.op
    if made is None or made.rule is None or behind is None or behind.rule is None:
        return False
    parted = [dim for dim in made.rule.operands[0] if len(dim) > 1]
    if len(parted) != 1 or any(len(dim) > 1 for dim in made.rule.results[0]):
        return False
    place = made.rule.results[0].index((parted[0][0],))
    merged = [dim for dim in behind.rule.results[0] if len(dim) > 1]
    return [d[0] for d in merged] == list(behind.rule.operands[0][place])


def _sizes(rule: Rule, dim: tuple[int, ...]) -> list[int]:
    return [rule.factors[f].size for f in dim]
