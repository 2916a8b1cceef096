"""Where copies are shared, and by what."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from rhino_jax.analysis.graph import Graph, NodeKind
from rhino_jax.analysis.inline_regions import inline_regions
from rhino_jax.analysis.uses import read_ports
from rhino_jax.frontend.trace import trace


X = jax.ShapeDtypeStruct((64, 128), "float32")


def graph_of(fn: Callable[..., Any], *args: Any) -> Graph:
    return inline_regions(trace(fn, args, {}).program)


def shared(graph: Graph) -> list[list[str]]:
    """What reads each copy, in order."""
    found = []
    for node in graph.nodes:
        if node.kind is NodeKind.COPY:
            readers = [graph.nodes[e.target] for e in graph.outgoing[node.id]]
            names = [r.op.name if r.op is not None else r.kind.value for r in readers]
            found.append(sorted(names))
    return found


def test_what_does_not_fuse_shares_and_what_fuses_stands_in_front() -> None:
    def f(x: Any) -> Any:
        return lax.sort(x, dimension=1), lax.cumsum(x, 1), x * 2

    graph = graph_of(f, X)
    assert shared(graph) == [["copy", "mul"], ["cumsum", "sort"]]
    front = graph.nodes[graph.fronts.copy().pop()]
    place = graph.columns.place
    assert all(place[front.id] < place[e.target] for e in graph.outgoing[front.id])
    # A fusion reads the value itself.
    reads = zip(read_ports(graph).tolist(), graph.edges, strict=True)
    mul = [p for p, e in reads if (op := graph.nodes[e.target].op) and op.name == "mul"]
    assert [graph.nodes[graph.ports[p].node].kind for p in mul] == [NodeKind.INPUT]


def test_slices_of_what_is_given_share() -> None:
    assert shared(graph_of(lambda x: x[:, 1::2] - x[:, ::2], X)) == [["slice", "slice"]]


def test_what_is_made_in_any_layout_is_made_so() -> None:
    def f(x: Any) -> Any:
        y = x + 1
        return y[:, 1:] - y[:, :-1], y * 2

    assert shared(graph_of(f, X)) == []


def test_elementwise_readers_alone_share_nothing() -> None:
    assert shared(graph_of(lambda x: (x * 2, jnp.tanh(x)), X)) == []


def test_branches_and_recomputed_regions_copy_for_themselves() -> None:
    def branches(p: Any, x: Any) -> Any:
        y = lax.cond(p, lambda x: lax.sort(x, dimension=1), lambda x: x, x)
        return y, lax.sort(x, dimension=0)

    assert shared(graph_of(branches, jax.ShapeDtypeStruct((), "bool"), X)) == []

    def block(x: Any, w: Any) -> Any:
        return jnp.tanh(jnp.tanh(x @ w) @ w).sum()

    w = jax.ShapeDtypeStruct((128, 128), "float32")
    merged = shared(graph_of(jax.value_and_grad(block), X, w))
    apart = shared(graph_of(jax.value_and_grad(jax.checkpoint(block)), X, w))
    # Forward twice and backward twice; recomputing reads it as often as forward.
    assert merged == [["dot_general"] * 4]
    assert apart == [["dot_general"] * 2, ["dot_general"] * 4]
