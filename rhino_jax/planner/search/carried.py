"""A solution of one program, mapped to another that is nearly the same."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable

import numpy as np

from rhino_jax.analysis.graph import Graph, Node, NodeKind
from rhino_jax.model.strategies import Strategy
from rhino_jax.planner.search.records import MeshProblem, SolvedMesh
from rhino_jax.solver.problem import Labels


def carried(solved: SolvedMesh, mesh_problem: MeshProblem) -> Labels | None:
    """Map a solution to the problem of another program on the same mesh that has most
    of the same source lines: one with another number of micro-batches, say, or with a
    loop split in two.

    The nth node of a source line takes the strategy of the nth node of that line. A
    node that cannot, or that has no counterpart, takes its cheapest strategy on its
    own: the choice is only a start for the search.

    Args:
      solved: the solution of the other program.
      mesh_problem: the problem, on the same mesh.
    Returns:
      The labels of all nodes; None where the other program has no solution.
    """
    labels, before = solved.solution.labels, solved.mesh_problem.model
    if labels is None:
        return None
    known: dict[Hashable, list[Strategy]] = defaultdict(list)
    for node, label in zip(before.graph.nodes, labels, strict=True):
        mine = before.options[node.id].strategies[label]
        known[_line(before.graph, node)].append(mine)
    model = mesh_problem.model
    met: dict[Hashable, int] = defaultdict(int)
    places: dict[int, dict[Strategy, int]] = {}
    found = np.zeros(len(model.graph.nodes), dtype=np.int64)
    for node in model.graph.nodes:
        line, options = _line(model.graph, node), model.options[node.id]
        # Nodes with equal options share one object.
        place = places.get(id(options))
        if place is None:
            place = {s: k for k, s in enumerate(options.strategies)}
            places[id(options)] = place
        like = known.get(line, [])
        at = min(met[line], len(like) - 1)
        met[line] += 1
        label = place.get(like[at]) if like else None
        found[node.id] = np.argmin(options.cost_s) if label is None else label
    return found


def _line(graph: Graph, node: Node) -> Hashable:
    """Return a key of a node that does not depend on the sizes of its values: the op
    and its source line, or for other nodes those of the nearest op."""
    rank = graph.program.values[node.value].rank
    near = node
    if node.kind is not NodeKind.OP:
        after = (graph.nodes[e.target] for e in graph.outgoing[node.id])
        before = (graph.nodes[e.source.node] for e in graph.incoming[node.id])
        ops = (n for side in (after, before) for n in side if n.kind is NodeKind.OP)
        near = next(ops, node)
    op = near.op
    return node.kind, rank, None if op is None else (op.name, op.source)
