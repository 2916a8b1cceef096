"""What an analysis says is stored."""

from __future__ import annotations

from rhino_jax.analysis.graph import Graph, NodeKind
from rhino_jax.analysis.liveness import Liveness


def stored(graph: Graph, live: Liveness) -> list[str]:
    """Names of the ops whose results are stored, in program order."""
    return [
        node.op.name
        for node in graph.nodes
        if node.kind is NodeKind.OP
        and node.op is not None
        and live.is_materialised[node.ports[0].id]
    ]
