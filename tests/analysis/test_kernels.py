"""What one fusion reads once, and how many kernels run."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from rhino_jax.analysis.fusing import Fusing
from rhino_jax.analysis.graph import Graph, NodeKind
from rhino_jax.analysis.inline_regions import inline_regions
from rhino_jax.analysis.liveness import Liveness, analyse
from rhino_jax.frontend.trace import trace


X = jnp.ones((64, 64), jnp.float32)


def analysed(
    fn: Callable[..., Any], *args: Any, fuses_rotations: bool = False
) -> tuple[Graph, Liveness]:
    program = trace(fn, args, {}).program
    graph = inline_regions(program, fuses_rotations=fuses_rotations)
    return graph, analyse(graph, Fusing())


def reads(graph: Graph, live: Liveness) -> Counter[str]:
    """How often each input is read from memory."""
    names: Counter[str] = Counter()
    for node, operands in zip(graph.nodes, live.kernels.reads, strict=True):
        for operand in operands:
            op = node.op
            assert op is not None
            maker = graph.nodes[graph.held[op.operands[operand]].node]
            if maker.kind is NodeKind.INPUT:
                names[graph.program.inputs[maker.slot].path] += 1
    return names


def launched(graph: Graph, live: Liveness) -> list[str]:
    every = zip(graph.nodes, live.kernels.launches, strict=True)
    return [n.op.name for n, is_launched in every if is_launched]  # type: ignore[union-attr]


def test_an_update_reads_all_it_needs_once() -> None:
    def update(p: Any, m: Any, v: Any, g: Any) -> Any:
        m = 0.9 * m + 0.1 * g
        v = 0.99 * v + 0.01 * g * g
        return p - 1e-3 * (m / (jnp.sqrt(v) + 1e-8) + 0.1 * p), m, v

    graph, live = analysed(update, X, X, X, X)
    assert reads(graph, live) == {"p": 1, "m": 1, "v": 1, "g": 1}
    assert len(launched(graph, live)) == 1


def test_products_read_transposed_matrices_as_they_are_stored() -> None:
    def read(fn: Callable[..., Any], *args: Any) -> list[str]:
        return launched(*analysed(fn, *args))

    batched, heads = jnp.ones((4, 16, 8)), jnp.ones((4, 16, 2, 8))
    assert read(lambda x, w: x @ w.T, X, X) == ["dot_general"]
    assert read(lambda x, w: (x @ w.T, w @ w.T), X, X) == ["dot_general"] * 2
    assert read(lambda x: x @ x.mT, batched) == ["dot_general"]
    # Converted first, its result is what is stored.
    converted = read(lambda x, w: x @ w.astype(jnp.bfloat16).T, X, X)
    assert converted == ["convert_element_type", "dot_general"]
    # A moved batch dim, and another reader.
    moved = read(lambda x: x.transpose(0, 2, 1, 3) @ x.transpose(0, 2, 3, 1), heads)
    assert moved == ["transpose", "dot_general"]
    assert "transpose" in read(lambda x, w: (x @ w.T, jnp.sin(w.T)), X, X)


def test_two_leaves_are_two_kernels() -> None:
    def update(p: Any, q: Any, g: Any, h: Any) -> Any:
        return p - 0.1 * g, q - 0.1 * h

    graph, live = analysed(update, X, X, X, X)
    assert len(launched(graph, live)) == 2


def test_a_matmul_between_makes_two_kernels_that_both_read() -> None:
    def residual(x: Any, w: Any) -> Any:
        return jnp.tanh(x + 1.0) @ w + x

    graph, live = analysed(residual, X, X)
    assert reads(graph, live) == {"x": 2, "w": 1}
    assert launched(graph, live) == ["add", "dot_general", "add"]


def test_a_normalisation_is_one_kernel() -> None:
    def norm(x: Any) -> Any:
        centred = x - jnp.mean(x, -1, keepdims=True)
        return centred / jnp.sqrt(jnp.mean(centred**2, -1, keepdims=True) + 1e-6)

    graph, live = analysed(norm, X)
    assert reads(graph, live) == {"x": 1}
    assert len(launched(graph, live)) == 1


def smoothed(x: Any) -> Any:
    return x + 0.1 * (jnp.roll(x, 1, 0) + jnp.roll(x, -1, 1) - 2 * x)


@pytest.mark.parametrize(
    ("fn", "fused", "stored"),
    [
        (smoothed, 1, 2),
        (lambda x: smoothed(2.0 * x), 1, 2),
        # The inner stencil is needed at several positions.
        (lambda x: smoothed(smoothed(x)), 2, 3),
        (lambda x: jnp.roll(2.0 * x, 1, 0) @ x, 2, 2),
    ],
    ids=["one", "computed operand", "two", "read by a product"],
)
def test_rotations_are_fused_where_the_compiler_fuses_them(
    fn: Callable[[Any], Any], fused: int, stored: int
) -> None:
    assert len(launched(*analysed(fn, X, fuses_rotations=True))) == fused
    assert len(launched(*analysed(fn, X))) == stored


def test_a_value_that_another_kernel_computes_again_is_read_again() -> None:
    def fn(x: Any, w: Any) -> Any:
        y = jnp.tanh(x) * 2.0
        return jnp.cos(y) @ w + y

    graph, live = analysed(fn, X, X)
    # By the kernel of the cosine, and by that of the sum behind the product.
    assert reads(graph, live) == {"x": 2, "w": 1}


@pytest.mark.parametrize(("size", "kernels"), [(1024, 1), (32_768, 2)])
def test_long_rows_are_read_once_for_each_reduction(size: int, kernels: int) -> None:
    program = trace(jax.nn.softmax, (jnp.ones((4, size)),), {}).program
    graph = inline_regions(program)
    live = analyse(graph, Fusing(parts_columns=True))
    assert reads(graph, live)["x"] == kernels


def test_arithmetic_takes_time_where_a_kernel_moves_little() -> None:
    def forces(x: Any) -> Any:
        distances = ((x[None] - x[:, None]) ** 2).sum(-1) + 1.0
        return (distances**-1.5).sum(1)

    def found(fn: Callable[..., Any], ops_per_byte: float) -> dict[str, float]:
        graph = inline_regions(trace(fn, (jnp.ones((512, 3)),), {}).program)
        ops = analyse(graph, Fusing(ops_per_byte=ops_per_byte)).kernels.vector_ops
        named = zip(graph.nodes, ops, strict=True)
        return {n.op.name: per for n, per in named if n.op is not None and per}

    assert found(forces, 12.0)["pow"] == 90.0
    # As many bytes as elements: a tanh of 40 operations hides behind 8 bytes.
    assert not found(jnp.tanh, 12.0)
    assert not found(forces, math.inf)

    def sums(x: Any, rows: int) -> Any:
        return jnp.exp(x[:, None, 0] * x[None, :, 0])[:rows].sum(1)

    # Of what a slice takes, a kernel computes as much as it takes.
    whole, part = (found(lambda x, n=n: sums(x, n), 0.0)["exp"] for n in (512, 8))
    assert part == whole * 8 / 512


@pytest.mark.parametrize(
    ("fn", "parts"),
    [
        (lambda x: x[16:32] * 2.0, [1]),
        (lambda x: x[:32] * x[32:], [2]),
        (lambda x: jax.lax.dynamic_slice(x, (3, 0), (8, 64)) * 2.0, [1]),
        (lambda x: x * 2.0 + x[:1], []),
        (lambda x: x[::-1] * 2.0, []),
    ],
)
def test_kernels_of_slices_read_parts(fn: Any, parts: list[int]) -> None:
    """No part of an array is read again that the same kernel reads as a whole."""
    _, live = analysed(fn, X)
    assert list(live.kernels.parts.values()) == parts
