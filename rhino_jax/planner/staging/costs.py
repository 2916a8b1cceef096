"""Predicted seconds of every op under a plan."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from rhino_jax.analysis.graph import Graph, NodeKind
from rhino_jax.ir.program import Program
from rhino_jax.planner.search.found import SearchResult


def seconds_by_op(found: SearchResult) -> dict[int, float]:
    """Return the seconds of every op of a plan, with the collectives that it waits for.

    Seconds are of all runs in a step; the communication that compute hides is
    subtracted from all ops proportionally, so that they sum up to the predicted step.

    Args:
      found: the result of a search in which a plan fits.
    """
    solved = found.solved[0]
    model, labels = solved.mesh_problem.model, solved.solution.labels
    assert labels is not None, "nothing was found"
    nodes = model.graph.nodes
    seconds = np.array(
        [costs[label] for costs, label in zip(model.problem.costs, labels, strict=True)]
    )
    for source, target, table in model.problem.edges:
        # The producer of an argument's next value also reshards it to that argument.
        is_made = nodes[target].kind is NodeKind.INPUT
        seconds[source if is_made else target] += table[labels[source], labels[target]]
    total = seconds.sum()
    scale = float(found.step_s / total) if total else 1.0
    by_op: dict[int, float] = {}
    for n in np.flatnonzero(seconds).tolist():
        op = _op_of(model.graph, n)
        by_op[op] = by_op.get(op, 0.0) + scale * float(seconds[n])
    return by_op


def _op_of(graph: Graph, n: int) -> int:
    """Return the op that a node's time belongs to: its own; for a value that is
    resharded for several readers the first of these, or its producer."""

    def after(m: int) -> list[int]:
        return [e.target for e in graph.outgoing[m]]

    def before(m: int) -> list[int]:
        return [e.source.node for e in graph.incoming[m]]

    for beside in (after, before):
        seen, around = {n}, [n]
        while around:
            ends = [graph.nodes[m] for m in around if graph.nodes[m].op is not None]
            if ends:
                op = min(ends, key=lambda node: node.time).op
                assert op is not None
                return op.id
            around = [
                m for m in {k for m in around for k in beside(m)} if m not in seen
            ]
            seen.update(around)
    return graph.program.body.ops[-1]  # An argument returned in another layout.


def with_regions(program: Program, seconds: Mapping[int, float], op_id: int) -> float:
    """Return the seconds of an op and of all ops in its regions."""
    op = program.ops[op_id]
    inner = () if op.call is None else op.call.regions
    return seconds.get(op_id, 0.0) + sum(
        with_regions(program, seconds, o) for region in inner for o in region.ops
    )
