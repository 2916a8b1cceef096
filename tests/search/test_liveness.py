"""Which values touch memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from rhino_jax.frontend.trace import trace
from rhino_jax.search.flatten import flatten
from rhino_jax.search.graph import NodeKind, Port
from rhino_jax.search.liveness import analyse


def stored(
    fn: Callable[..., Any], *args: Any, fuses_matmul_operands: bool = False
) -> list[str]:
    """Names of the ops whose results are stored, in program order."""
    graph = flatten(trace(fn, args, {}).program)
    live = analyse(graph, fuses_matmul_operands=fuses_matmul_operands)
    return [
        node.op.name
        for node in graph.nodes
        if node.kind is NodeKind.OP
        and node.op is not None
        and live.is_stored.get(Port(node.id, 0))
    ]


X = jnp.ones((8, 8), jnp.float32)


def test_a_matmuls_operand_is_stored_unless_the_compiler_fuses_it() -> None:
    def one(x: Any, w: Any) -> Any:
        return (x * 2.0).astype(jnp.bfloat16) @ w

    args = (X, X.astype(jnp.bfloat16))
    assert stored(one, *args) == ["convert_element_type", "dot_general"]
    assert stored(one, *args, fuses_matmul_operands=True) == ["dot_general"]


def test_what_two_matmuls_read_is_stored_where_making_it_reads_more() -> None:
    def narrow(x: Any, y: Any, w: Any) -> Any:
        z = x * 2.0
        return z @ w + w @ z

    def wide(x: Any, y: Any, w: Any) -> Any:
        z = x * y
        return z @ w + w @ z

    for fn, names in ((narrow, []), (wide, ["mul"])):
        found = stored(fn, X, X, X, fuses_matmul_operands=True)
        assert [n for n in found if n != "dot_general"][: len(names)] == names
        assert found.count("mul") == len(names)


@pytest.mark.parametrize("fuses", [False, True])
def test_softmax_keeps_its_exponentials_for_the_backward_pass(fuses: bool) -> None:
    def attention(q: Any, k: Any, v: Any) -> Any:
        scores = (q @ k.T).astype(jnp.float32)
        for _ in range(8):
            scores = jnp.where(scores > 0, scores, scores - 1.0)
        weights = jax.nn.softmax(scores).astype(jnp.bfloat16)
        return jnp.sum((weights @ v).astype(jnp.float32) ** 2)

    args = (X.astype(jnp.bfloat16),) * 3
    found = stored(jax.grad(attention, argnums=(0, 1, 2)), *args,
                   fuses_matmul_operands=fuses)  # fmt: skip
    assert found.count("exp") == 1
