"""Sums of partial sums: reductions whose results are only added to one another.

XLA reduces such a sum once (`AllReduceReassociate` in openxla/xla,
hlo/transforms/collectives/all_reduce_reassociate.cc): the gradient of a weight that is
used in several places, and of what several weights read, as queries, keys and values.
Scatters into zeros that are added become scatters into one another first
(`rhino_jax.analysis.uses.find_scattered_onto`), wherever they stand in the sum.

Seen on v5e:2x4 and h100:8 (jax 0.10.2, libtpu 0.0.52) for products, sums and maxima,
with reshapes and transposes in between, replicated and scattered; not where a result is
converted (bfloat16 to float32), scaled, read elsewhere too, or added to another value
first. A scatter and a product are reduced each. XLA:CPU reduces every result.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from rhino_jax.analysis.graph import Graph, NodeKind
from rhino_jax.analysis.uses import find_scattered_onto
from rhino_jax.ir.program import Op
from rhino_jax.ir.traits import OpKind


class _Terms(NamedTuple):
    """The terms of a sum, or of what `reducer` names instead.

    Attributes:
      reducer: how they are combined.
      reduced: ids of the nodes with partial results among them; None: there are other
        terms beside these and the scatters.
      scatters: ids of the scatters into zeros.
    """

    reducer: str | None = None
    reduced: tuple[int, ...] | None = None
    scatters: tuple[int, ...] = ()

    def combined(self, other: _Terms, reducer: str) -> _Terms:
        """Return the terms of the sum of two."""
        left, right = (t if t.reducer == reducer else _Terms() for t in (self, other))
        reduced = None
        if left.reduced is not None and right.reduced is not None:
            reduced = left.reduced + right.reduced
        return _Terms(reducer, reduced, left.scatters + right.scatters)


def find_sums(graph: Graph) -> Mapping[int, tuple[int, ...]]:
    """Return node id → ids of the nodes, itself among them, whose partial results are
    reduced as one sum; they share one tuple. Absent: nodes that are reduced alone."""
    scatters = set(find_scattered_onto(graph).values())
    made: dict[int, _Terms] = {}
    found: dict[int, tuple[int, ...]] = {}
    for node in graph.run_order:
        op = node.op
        if node.kind is not NodeKind.OP or op is None or len(node.ports) > 1:
            continue
        sources = [e.source for e in graph.incoming[node.id]]
        read = [
            made.get(s.node, _Terms()) if len(graph.readers[s.id]) == 1 else _Terms()
            for s in sources
        ]
        reducers = _reducers(op)
        if node.id in scatters:
            made[node.id] = _Terms(op.traits.reducer, (), (node.id,))
        elif len(reducers) == 1:
            made[node.id] = _Terms(reducers.pop(), (node.id,))
        elif len(read) == len(op.operands) == 1 and _rearranges(graph, op):
            made[node.id] = read[0]._replace(scatters=())
        elif len(read) == 2 and op.traits.kind is OpKind.ELEMENTWISE:
            made[node.id] = terms = read[0].combined(read[1], op.traits.reducer)
            for together in (terms.reduced or (), terms.scatters):
                if len(together) > 1:
                    found.update(dict.fromkeys(together, together))
    return found


def _reducers(op: Op) -> set[str | None]:
    """Return how the partial results of an op are combined; empty: it has none."""
    if op.rule is None or op.manual is not None:
        return set()
    factors = op.rule.factors
    return {f.reducer for at, f in enumerate(factors) if op.rule.partial_results(at)}


def _rearranges(graph: Graph, op: Op) -> bool:
    """Whether the result of an op has all elements of its only operand, each once."""
    made, taken = (graph.program.values[v] for v in (op.results[0], op.operands[0]))
    return op.traits.kind is OpKind.MOVEMENT and made.bytes == taken.bytes
