"""What something waits for cannot hide; what only the optimizer reads can."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp

from rhino_jax.analysis.graph import Graph, NodeKind
from rhino_jax.analysis.inline_regions import inline_regions
from rhino_jax.analysis.matmul_depth import find_matmul_depth
from rhino_jax.analysis.slack import find_slack
from rhino_jax.frontend.trace import trace
from rhino_jax.solver.overlap import Slack, Wait


X = jnp.ones((64, 64), jnp.float32)
LAYERS = 4


def found(fn: Any, *args: Any) -> tuple[Graph, Slack]:
    graph = inline_regions(trace(fn, args, {}).program)
    return graph, find_slack(graph, find_matmul_depth(graph))


def matmuls(graph: Graph, slack: Slack) -> list[bool]:
    return [
        slack.nodes[n.id] >= Wait.LATER
        for n in graph.nodes
        if n.kind is NodeKind.OP and n.op is not None and n.op.name == "dot_general"
    ]


def reads_of(graph: Graph, slack: Slack, path: str) -> list[bool]:
    """For every read of an input, whether it may come late."""
    return [
        wait >= Wait.LATER
        for edge, wait in zip(graph.edges, slack.edges, strict=True)
        if (maker := graph.nodes[edge.source.node]).kind is NodeKind.INPUT
        and graph.program.inputs[maker.slot].path == path
    ]


def forward(weights: Any, x: Any) -> Any:
    for w in weights:
        x = jnp.tanh(x @ w)
    return x


def test_activations_in_a_chain_have_no_slack_later_weights_have() -> None:
    graph, slack = found(forward, [X] * LAYERS, X)
    assert matmuls(graph, slack) == [False] * LAYERS
    assert reads_of(graph, slack, "x") == [False]
    weights = [reads_of(graph, slack, f"weights[{i}]") for i in range(LAYERS)]
    assert weights == [[False], [True], [True], [True]]


def test_weight_gradients_have_slack_but_for_the_last() -> None:
    def step(weights: Any, x: Any) -> Any:
        grads = jax.grad(lambda ws: jnp.sum(forward(ws, x) ** 2))(weights)
        return [w - 0.1 * g for w, g in zip(weights, grads, strict=True)]

    graph, slack = found(step, [X] * LAYERS, X)
    backwards = matmuls(graph, slack)[LAYERS:]
    # Backwards, each layer makes its weight's gradient and then the next cotangent.
    gradients, cotangents = sum(backwards), len(backwards) - sum(backwards)
    assert (gradients, cotangents) == (LAYERS - 1, LAYERS)


def test_in_a_loop_time_ends_with_the_body() -> None:
    def stacked(weights: Any, x: Any) -> Any:
        def body(x: Any, w: Any) -> Any:
            y = x @ w
            return jnp.tanh(y), y.T @ x

        return jax.lax.scan(body, x, weights)

    graph, slack = found(stacked, jnp.stack([X] * LAYERS), X)
    # What leaves into the stack is made at the end of the body: nothing hides it.
    assert matmuls(graph, slack) == [False, False]


def test_independent_branches_hide_the_shorter() -> None:
    def two(x: Any, w: Any) -> Any:
        return (x @ w) @ w @ w + x.T @ w

    graph, slack = found(two, X, X)
    assert sorted(matmuls(graph, slack)) == [False, False, False, True]


def kinds(graph: Graph, slack: Slack) -> list[Wait]:
    """Of the matmuls."""
    return [
        Wait(slack.nodes[n.id])
        for n in graph.nodes
        if n.op is not None and n.op.name == "dot_general"
    ]


def test_gradients_are_free_till_the_end_and_the_last_till_its_update() -> None:
    def step(weights: Any, x: Any) -> Any:
        grads = jax.grad(lambda ws: jnp.sum(forward(ws, x) ** 2))(weights)
        return [w - 0.1 * g for w, g in zip(weights, grads, strict=True)]

    program = trace(step, ([X] * LAYERS, X), {}, donate_argnums=0).program
    graph = inline_regions(program)
    backwards = kinds(graph, find_slack(graph, find_matmul_depth(graph)))[LAYERS:]
    assert Counter(backwards) == {
        Wait.NONE: LAYERS - 1,
        Wait.FREE: LAYERS - 1,
        Wait.UPDATE: 1,
    }


def test_values_between_matmuls_may_come_later_but_are_not_free() -> None:
    def gated(weights: Any, gate: Any, x: Any) -> Any:
        return forward(weights, forward(weights, x) * (x @ gate))

    graph, slack = found(gated, [X] * LAYERS, X, X)
    waits = kinds(graph, slack)
    assert Counter(waits) == {Wait.NONE: 2 * LAYERS, Wait.LATER: 1}
    reads = zip(graph.edges, slack.edges, strict=True)
    free = {graph.nodes[e.source.node].kind for e, wait in reads if wait == Wait.FREE}
    assert free == {NodeKind.INPUT, NodeKind.COPY}  # copies of weights


def test_where_updates_hide_nothing_what_is_due_at_the_end_waits() -> None:
    slack = Slack(tuple(Wait), tuple(reversed(Wait)))
    without, beside = slack.where(False), slack.where(True)
    assert without.nodes == (0, 0, 0, Wait.LATER, Wait.FREE)
    assert beside.nodes == (0, Wait.BACK, Wait.FREE, Wait.LATER, Wait.FREE)
    assert beside.edges == tuple(reversed(beside.nodes))


def waits(graph: Graph, slack: Slack, name: str) -> list[Wait]:
    return [
        Wait(slack.nodes[n.id])
        for n in graph.nodes
        if n.kind is NodeKind.OP and n.op is not None and n.op.name == name
    ]


def test_a_dot_product_in_a_serial_loop_has_no_slack() -> None:
    def solve(d: Any, b: Any) -> Any:
        def step(c: Any, _: Any) -> Any:
            x, r, p, rr = c
            a = rr / jnp.vdot(p, d * p)
            r = r - a * d * p
            new = jnp.sum(r * r)
            return (x + a * p, r, r + (new / rr) * p, new), None

        return jax.lax.scan(step, (b, b, b, jnp.vdot(b, b)), None, length=9)[0][0]

    graph, slack = found(solve, X[0], X[0])
    assert waits(graph, slack, "dot_general")[1:] == [Wait.NONE]
    assert waits(graph, slack, "reduce_sum") == [Wait.NONE]


def test_what_a_predicate_decides_waits_for_its_norm() -> None:
    def scaled(w: Any) -> Any:
        n = jnp.sum(w * w)
        return jax.lax.cond(n > 1, lambda w: w * 0.5, lambda w: w + 1, w) @ X

    def until(w: Any) -> Any:
        return jax.lax.while_loop(
            lambda w: jnp.sum(w * w) > 1, lambda w: w * 0.5, w @ X
        )

    for fn in (scaled, until):
        graph, slack = found(fn, X)
        assert waits(graph, slack, "reduce_sum") == [Wait.NONE]


def test_a_global_norm_has_slack_for_all_gradients_but_the_last() -> None:
    def step(weights: Any, x: Any) -> Any:
        grads = jax.grad(lambda ws: forward(ws, x)[0, 0])(weights)
        norm = jnp.sqrt(sum(jnp.sum(g * g) for g in grads))
        return [w - g / norm for w, g in zip(weights, grads, strict=True)]

    graph, slack = found(step, [X] * LAYERS, X)
    sums = waits(graph, slack, "reduce_sum")
    assert sorted(sums) == [Wait.NONE] + [Wait.FREE] * (LAYERS - 1)
    # A norm that is only reported is waited for by nothing.
    graph, slack = found(lambda x: (x @ X, jnp.sum(x * x)), X)
    assert waits(graph, slack, "reduce_sum") == [Wait.FREE]
