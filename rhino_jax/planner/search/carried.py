"""What was chosen for one program, in another that is nearly the same."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable

import numpy as np

from rhino_jax.analysis.graph import Graph, Node, NodeKind
from rhino_jax.model.strategies import Strategy
from rhino_jax.planner.search.records import MeshProblem, SolvedMesh
from rhino_jax.solver.problem import Labels


def carried(solved: SolvedMesh, mesh_problem: MeshProblem) -> Labels | None:
    """A choice of all nodes of a problem, from what was chosen on the same mesh of a
    program with most of its lines: of another number of micro-batches, say, or with a
    loop in two.

    The nth node that is of a line does what the nth one of that line did. One that
    cannot, or has no counterpart, does what costs the least by itself: the choice is
    where a search begins, no more.

    Args:
      solved: the search of the other program.
      mesh_problem: the problem, on the same mesh.
    Returns:
      None where nothing was found.
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
        # Options are shared by all nodes that have the same.
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
    """What a node is, whatever the sizes of its values: an op of a line of the user's
    code, or a value on its way from or to one."""
    rank = graph.program.values[node.value].rank
    near = node
    if node.kind is not NodeKind.OP:
        after = (graph.nodes[e.target] for e in graph.outgoing[node.id])
        before = (graph.nodes[e.source.node] for e in graph.incoming[node.id])
        ops = (n for side in (after, before) for n in side if n.kind is NodeKind.OP)
        near = next(ops, node)
    op = near.op
    return node.kind, rank, None if op is None else (op.name, op.source)
