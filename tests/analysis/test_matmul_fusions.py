"""Fusions of XLA:TPU around a matmul, as in HLO of a ViT, a BERT and a GPT (v5e:4x4,
libtpu 0.0.52)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from rhino_jax.analysis.fusing import Fusing
from rhino_jax.analysis.graph import Graph, Node, NodeKind
from rhino_jax.analysis.inline_regions import inline_regions
from rhino_jax.analysis.liveness import Liveness, analyse
from rhino_jax.frontend.trace import trace
from rhino_jax.hardware.files import load_target


TPU, GPU = (Fusing.of(load_target(name).device) for name in ("v5e", "h100"))
X = jnp.ones((64, 64), jnp.bfloat16)
W = jnp.ones((64, 64), jnp.float32)


def analysed(
    fn: Callable[..., Any], *args: Any, fusing: Fusing = TPU
) -> tuple[Graph, Liveness]:
    graph = inline_regions(trace(fn, args, {}).program)
    return graph, analyse(graph, fusing)


def ops(graph: Graph, name: str) -> list[Node]:
    every = (n for n in graph.run_order if n.kind is NodeKind.OP and n.op is not None)
    return [n for n in every if n.op is not None and n.op.name == name]


def stored(graph: Graph, live: Liveness, shape: tuple[int, ...]) -> list[str]:
    """Return the names of the ops that store a value of a shape."""
    return [
        n.op.name
        for n in graph.run_order
        if n.op is not None and n.kind is NodeKind.OP
        if live.is_materialised[n.ports[0].id]
        and graph.program.values[n.value].shape == shape
    ]


def mlp(w: Any, x: Any) -> Any:
    hidden = jax.nn.gelu(x @ w["up"].astype(x.dtype) + w["bias"].astype(x.dtype))
    return jnp.square(hidden @ w["down"].astype(x.dtype)).astype(jnp.float32).sum()


MLP = {"up": jnp.ones((64, 256)), "bias": jnp.ones(256), "down": jnp.ones((256, 64))}


def test_activations_run_in_the_kernels_of_matmuls() -> None:
    graph, live = analysed(jax.grad(mlp), MLP, X[:32])
    # Of [rows, hidden]: what the activation reads, and its gradient.
    assert stored(graph, live, (32, 256)) == ["add", "add_any"]
    (tanh,) = ops(graph, "tanh")
    assert not live.kernels.launches[tanh.id] and not live.kernels.reads[tanh.id]
    # The gradient of the bias is summed where the activation's gradient is computed.
    sums = [n for n in ops(graph, "reduce_sum") if graph.program.values[n.value].rank]
    assert not live.kernels.reads[sums[0].id]
    assert sums[0].id not in live.kernels.widened


def test_a_kernel_reads_what_it_converts() -> None:
    graph, live = analysed(lambda x, w: x @ w.astype(x.dtype), X, W)
    (dot,) = ops(graph, "dot_general")
    (convert,) = ops(graph, "convert_element_type")
    assert live.kernels.reads[dot.id] == (0, 1)
    assert [live.kernels.ratio(dot, i) for i in (0, 1)] == [1.0, 2.0]
    assert live.kernels.reads[convert.id] == ()


def test_several_readers_that_meet_again_are_one_kernel() -> None:
    def meeting(x: Any) -> Any:
        y = x @ x
        return jnp.sin(y) * (y + 1.0)

    graph, live = analysed(meeting, X)
    assert stored(graph, live, (64, 64)) == ["mul"]

    def parting(x: Any) -> Any:
        y = x @ x
        return jnp.sin(y), jnp.cos(y)

    graph, live = analysed(parting, X)
    assert stored(graph, live, (64, 64)) == ["dot_general", "sin", "cos"]


def test_means_are_summed_with_the_matmul_and_variances_later() -> None:
    def normalised(x: Any) -> Any:
        y = (x @ x).astype(jnp.float32)
        centred = y - y.mean(-1, keepdims=True)
        return centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True))

    graph, live = analysed(normalised, X)
    mean, variance = ops(graph, "reduce_sum")
    assert mean.id not in live.kernels.widened
    assert live.kernels.widened[variance.id] == 0


@pytest.mark.parametrize(("fusing", "are_stored"), [(TPU, False), (GPU, True)])
def test_labels_of_a_cross_entropy_are_compared_in_its_gradient(
    fusing: Fusing, are_stored: bool
) -> None:
    def loss(x: Any, w: Any, labels: Any) -> Any:
        logits = (x @ w).astype(jnp.float32)
        each = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return each.mean()

    args = X, jnp.ones((64, 512), jnp.bfloat16), jnp.zeros(64, jnp.int32)
    graph, live = analysed(jax.grad(loss, argnums=(0, 1)), *args, fusing=fusing)
    found = stored(graph, live, (64, 512))
    assert any("scatter" in name for name in found) == are_stored
    assert "broadcast_in_dim" not in found or are_stored


def test_empty_arrays_have_no_ratio() -> None:
    def weighted(x: Any, w: Any) -> Any:
        return x @ w.astype(x.dtype)

    _, live = analysed(weighted, X[:, :0], W[:0])
    assert {of.ratio for of in live.kernels.through.values()} == {0.0}


def test_a_matmuls_kernel_reads_and_writes_for_the_ops_after_it() -> None:
    """An addition to its result; or a sum of it, beside an addition that ends it."""

    def added(x: Any, w: Any, y: Any) -> Any:
        return jnp.tanh(x @ w) + y

    def summed(x: Any, w: Any, y: Any) -> Any:
        scores = (x @ w).astype(jnp.float32)
        return scores + y, (scores * y).sum(-1)

    for step, last, others in (added, "add", {}), (summed, "reduce_sum", {"add": (1,)}):
        graph, live = analysed(step, X, X, W)
        (matmul,), (node,) = ops(graph, "dot_general"), ops(graph, last)
        (y,) = (p.id for n in graph.nodes for p in n.ports if n.slot == 2 and not n.op)
        epilogue, reads = live.kernels.epilogues[matmul.id], live.kernels.reads
        assert [port for port, _ in epilogue.reads] == [y]
        assert epilogue.writes == (node.ports[0].id,) and epilogue.computes
        assert node.id in live.kernels.of_epilogues and reads[node.id] == ()
        for name, operands in others.items():
            assert [reads[n.id] for n in ops(graph, name)] == [operands]
        assert analysed(step, X, X, W, fusing=GPU)[1].kernels.epilogues == {}


@pytest.mark.parametrize(
    ("scores_of", "are_stored"),
    [(lambda q, k: q @ k, True), (lambda q, k: (q @ k) * 2, True),
     (lambda q, k: (q @ k).astype(jnp.float32), True),
     (lambda q, k: (q @ k).astype(jnp.float32) * 2, False),
     (lambda q, k: jnp.transpose(q @ k).astype(jnp.float32) * 2, True)],
)  # fmt: skip
def test_scores_of_two_bytes_or_transposed_ones_are_stored(
    scores_of: Any, are_stored: bool
) -> None:
    """In place of the exponentials: as compiled for v5e, tests/verify."""

    def attention(q: Any, k: Any, v: Any) -> Any:
        return jax.nn.softmax(scores_of(q, k), axis=-1).astype(q.dtype) @ v

    found = stored(*analysed(attention, X, X, X), X.shape)
    assert ("exp" in found) is not are_stored
    assert found.count("dot_general") == 1 + are_stored
