"""What enters and leaves programs that are compiled on their own is in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from helpers_stored import stored

from rhino_jax.analysis.fusing import Fusing
from rhino_jax.analysis.graph import Graph, NodeKind
from rhino_jax.analysis.inline_regions import inline_regions
from rhino_jax.analysis.liveness import Liveness, analyse
from rhino_jax.frontend.trace import trace
from rhino_jax.hardware.files import load_target


GPU = Fusing.of(load_target("h100").device)
X = jnp.ones((64, 64), jnp.float32)


def analysed(
    fn: Callable[..., Any], *args: Any, is_program: bool
) -> tuple[Graph, Liveness]:
    """Args:
    fn: calls `jax.jit` of functions.
    is_program: whether each of these is compiled alone.
    """
    program = trace(fn, args, {}).program
    ops = list(program.ops)
    for i in program.body.ops:
        call = ops[i].call
        assert call is not None, ops[i].name
        ops[i] = replace(ops[i], call=replace(call, is_program=is_program))
    graph = inline_regions(replace(program, ops=tuple(ops)))
    return graph, analyse(graph, GPU)


@pytest.mark.parametrize("is_program", [False, True])
def test_a_chain_is_stored_where_it_is_cut(is_program: bool) -> None:
    def both(x: Any) -> Any:
        half = jax.jit(lambda x: jnp.tanh(x) * 2.0)(x)
        return jax.jit(lambda y: jnp.cos(y) + 1.0)(half)

    found = stored(*analysed(both, X, is_program=is_program))
    assert found == (["mul", "add"] if is_program else ["add"])


@pytest.mark.parametrize("is_program", [False, True])
def test_a_softmax_that_leaves_its_exponential_is_three_kernels(
    is_program: bool,
) -> None:
    def softmax(x: Any) -> Any:
        high = jnp.exp(x - x.max(-1, keepdims=True))
        return high / high.sum(-1, keepdims=True), high

    def both(x: Any) -> Any:
        y, high = jax.jit(softmax)(x)
        return jax.jit(lambda y, high: y * high)(y, high)

    graph, live = analysed(both, X, is_program=is_program)
    reads = sum(
        graph.nodes[graph.held[node.op.operands[i]].node].value
        in [n.value for n in graph.nodes if n.op and n.op.name == "exp"]
        for node, operands in zip(graph.nodes, live.kernels.reads, strict=True)
        if node.op is not None
        for i in operands
    )
    # By the sum, by the quotient, and by the other program.
    assert reads == (3 if is_program else 0)
    assert ("exp" in stored(graph, live)) == is_program


@pytest.mark.parametrize("length", [1, 2])
def test_what_a_loop_of_one_trip_stacks_is_what_its_body_makes(length: int) -> None:
    def loop(x: Any) -> Any:
        def body(h: Any, _: Any) -> Any:
            h = jnp.sin(h @ h)
            return h, h @ h

        return jax.lax.scan(body, x, length=length)

    graph = inline_regions(trace(loop, (X,), {}).program)
    live = analyse(graph, GPU)
    (stack,) = [n for n in graph.nodes if n.kind is NodeKind.STACK]
    start = graph.loop_end if length == 1 else graph.loop_start
    assert live.first[stack.ports[0].id] == start[stack.id]
