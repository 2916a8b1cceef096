"""Which values touch memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from helpers_stored import stored

from rhino_jax.analysis.fusing import Fusing
from rhino_jax.analysis.graph import NodeKind
from rhino_jax.analysis.inline_regions import inline_regions
from rhino_jax.analysis.liveness import analyse, find_late
from rhino_jax.frontend.trace import trace
from rhino_jax.hardware.files import load_target
from rhino_jax.hardware.lowering import OBSERVED


PLAIN = Fusing()
TPU = Fusing.of(load_target("v5e").device)
GPU = Fusing.of(load_target("h100").device)


def materialised(
    fn: Callable[..., Any], *args: Any, fusing: Fusing = PLAIN
) -> list[str]:
    """Names of the ops whose results are stored, in program order."""
    graph = inline_regions(trace(fn, args, {}).program)
    return stored(graph, analyse(graph, fusing))


X = jnp.ones((64, 64), jnp.float32)


def test_a_matmuls_operand_is_stored_unless_the_compiler_fuses_it() -> None:
    def one(x: Any, w: Any) -> Any:
        return (x * 2.0).astype(jnp.bfloat16) @ w

    args = (X, X.astype(jnp.bfloat16))
    assert materialised(one, *args) == ["convert_element_type", "dot_general"]
    assert materialised(one, *args, fusing=TPU) == ["dot_general"]


def test_what_two_matmuls_read_is_stored_where_making_it_reads_more() -> None:
    def narrow(x: Any, y: Any, w: Any) -> Any:
        z = x * 2.0
        return z @ w + w @ z

    def wide(x: Any, y: Any, w: Any) -> Any:
        z = x * y
        return z @ w + w @ z

    for fn, names in ((narrow, []), (wide, ["mul"])):
        found = materialised(fn, X, X, X, fusing=TPU)
        assert [n for n in found if n != "dot_general"][: len(names)] == names
        assert found.count("mul") == len(names)


@pytest.mark.parametrize(
    ("fusing", "kept", "scores"),
    [(PLAIN, ["exp", "convert_element_type"], True), (TPU, ["exp"], False),
     (GPU, ["convert_element_type"], True)],
)  # fmt: skip
def test_what_softmax_keeps_for_the_backward_pass(
    fusing: Fusing, kept: list[str], scores: bool
) -> None:
    def attention(q: Any, k: Any, v: Any) -> Any:
        weights = jax.nn.softmax((q @ k.T).astype(jnp.float32) * 0.125)
        out = (weights.astype(jnp.bfloat16) @ v).astype(jnp.float32)
        return jnp.sum(out**2)

    args = (X.astype(jnp.bfloat16),) * 3
    found = materialised(jax.grad(attention, argnums=(0, 1, 2)), *args, fusing=fusing)
    # Of the forward pass: what comes before its second matmul.
    dots = [i for i, name in enumerate(found) if name == "dot_general"]
    assert [
        n for n in found[: dots[scores]] if n in ("exp", "convert_element_type")
    ] == kept


@pytest.mark.parametrize(("dtype", "is_stored"), [("float32", 0), ("bfloat16", 1)])
def test_gpus_store_the_tanh_of_a_gelu_that_is_not_made_in_its_own_type(
    dtype: str, is_stored: int
) -> None:
    """As compiled for h100, jax 0.10.2: between two conversions it stays."""

    def loss(x: Any, w: Any) -> Any:
        return jnp.sum((jax.nn.gelu(x @ w) @ w).astype(jnp.float32) ** 2)

    args = (X.astype(dtype),) * 2
    found = materialised(jax.grad(loss, argnums=(0, 1)), *args, fusing=GPU)
    assert found.count("tanh") == is_stored


def test_gpus_recompute_the_sigmoid_of_a_gate() -> None:
    def step(x: Any, w: Any) -> Any:
        return jax.grad(lambda x: jnp.square(jax.nn.silu(x @ w) @ w).sum())(x)

    assert "logistic" in materialised(step, X, X)
    assert "logistic" not in materialised(step, X, X, fusing=GPU)


def test_gpus_store_the_narrowest_value_that_a_norm_and_its_gradient_read() -> None:
    def norm(x: Any, y: Any) -> Any:
        wide = (x + y).astype(jnp.float32)
        centred = wide - wide.mean(-1, keepdims=True)
        scale = jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True))
        return (centred * scale).astype(x.dtype)

    def step(x: Any, y: Any, w: Any) -> Any:
        return jax.grad(lambda x, y: (norm(x, y) @ w).sum(), (0, 1))(x, y)

    x = X.astype(jnp.bfloat16)
    graph = inline_regions(trace(step, (x, x, x), {}).program)

    def kept(fusing: Fusing) -> set[str]:
        live = analyse(graph, fusing)
        every = zip(graph.ports, live.is_materialised, strict=True)
        ops = [graph.nodes[p.node].op for p, is_it in every if is_it]
        values = [graph.program.values[op.results[0]] for op in ops if op is not None]
        return {v.dtype for v in values if v.shape == X.shape}

    assert kept(GPU) == {"bfloat16"}
    assert kept(PLAIN) == {"bfloat16", "float32"}


def test_a_look_up_on_gpus_converts_what_it_picks() -> None:
    def loss(x: Any, w: Any, labels: Any) -> Any:
        logits = (x @ w).astype(jnp.float32)
        picked = jnp.take_along_axis(logits, labels[:, None], -1)
        return (jax.nn.logsumexp(logits, -1) - picked[:, 0]).sum()

    x = X.astype(jnp.bfloat16)
    args = x, x, jnp.zeros(64, jnp.int32)
    assert "convert_element_type" in materialised(loss, *args)
    assert "convert_element_type" not in materialised(loss, *args, fusing=GPU)
    # Embeddings are looked up where they are added up.
    summed = materialised(lambda t, i: t[i] + t[i + 1], X, args[2], fusing=GPU)
    assert "gather" not in summed and summed[-1] == "add"


def test_updates_are_scattered_onto_what_their_sum_is_added_to() -> None:
    def step(x: Any, i: Any, u: Any) -> Any:
        added = jnp.tanh(x @ x) + jnp.zeros_like(x).at[i].add(u)
        return added @ x

    program = trace(step, (X, jnp.zeros(8, jnp.int32), X[:8]), {}).program
    graph = inline_regions(program)
    live = analyse(graph, GPU)
    product, scatter, last = (
        next(n for n in nodes if n.op is not None and n.op.name == name)
        for name, nodes in (
            ("dot_general", graph.nodes),
            ("scatter-add", graph.nodes),
            ("dot_general", graph.nodes[::-1]),
        )
    )
    assert live.last[product.ports[0].id] == scatter.time < last.time


def test_what_follows_a_matmul_is_stored_in_its_place() -> None:
    def relu_and_square(x: Any, w: Any, b: Any) -> Any:
        y = jnp.maximum(x @ w + b, 0.0)
        return y, y * y

    names = ["add", "max", "mul"]
    assert materialised(relu_and_square, X, X, X[0])[0] == "dot_general"
    found = materialised(relu_and_square, X, X, X[0], fusing=TPU)
    assert "dot_general" not in found
    assert [n for n in found if n in names] == ["max", "mul"]


@pytest.mark.parametrize("fusing", [PLAIN, TPU])
def test_nothing_is_fused_into_products_of_ragged_groups(fusing: Fusing) -> None:
    """As XLA:TPU compiles it: v5e:2x2, libtpu 0.0.52."""

    def experts(x: Any, w: Any, sizes: Any) -> Any:
        hidden = jnp.tanh(jax.lax.ragged_dot(x, w, sizes))
        return jax.lax.ragged_dot(hidden, w, sizes)

    weights, sizes = jnp.stack([X, X]), jnp.array([24, 40], jnp.int32)
    found = materialised(experts, X, weights, sizes, fusing=fusing)
    names = [name.partition("_general")[0] for name in found]
    assert names == ["ragged_dot", "tanh", "ragged_dot"]


def test_where_readers_part_a_conversion_is_left_to_each() -> None:
    def parting(x: Any, w: Any) -> Any:
        y = (x @ w).astype(jnp.float32)
        return jnp.sum(y), jnp.exp(y) @ y

    found = materialised(
        parting, X.astype(jnp.bfloat16), X.astype(jnp.bfloat16), fusing=TPU
    )
    assert found[0] == "dot_general"
    assert "convert_element_type" not in found


def test_one_of_two_matmuls_is_stored_before_they_meet() -> None:
    def sums(x: Any, w: Any) -> Any:
        return x @ w + w @ x

    assert materialised(sums, X, X, fusing=TPU) == ["dot_general", "add"]
    assert materialised(sums, X, X) == ["dot_general", "dot_general", "add"]


def test_what_a_matmul_and_a_reduction_read_is_stored_where_dear() -> None:
    def normalised(q: Any, k: Any, v: Any) -> Any:
        return jax.nn.softmax(q @ k, axis=-1) @ v

    found = materialised(normalised, X, X, X, fusing=TPU)
    # One kernel computes the scores, their maxima, exp and its sums.
    assert [n for n in found if "reduce" not in n] == ["exp", "dot_general"]
    assert "exp" not in materialised(normalised, X, X, X)


def test_outer_products_with_a_matmuls_result_are_recomputed() -> None:
    def clipped(x: Any, w: Any) -> Any:
        each = jnp.einsum("ni,nj->nij", 2 * (x @ w), x).mT
        return (each / (each * each).sum((1, 2))[:, None, None]).sum(0)

    assert "transpose" not in materialised(clipped, X, X, fusing=TPU)


def test_of_rows_that_no_fusion_holds_only_the_scores_are_stored() -> None:
    def attention(q: Any, k: Any, v: Any) -> Any:
        scores = jnp.where(q[:, :1] > 0, (q @ k).astype(jnp.float32), -1e9)
        return jax.nn.softmax(scores, axis=-1).astype(q.dtype) @ v

    def shapes(row: int) -> tuple[jax.ShapeDtypeStruct, ...]:
        sizes = ((8, 4), (4, row), (row, 4))
        return tuple(jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in sizes)

    def kept(row: int, fusing: Fusing) -> list[str]:
        found = materialised(attention, *shapes(row), fusing=fusing)
        return [n for n in found if "reduce" not in n]

    assert kept(OBSERVED.longest_row, TPU) == ["exp", "dot_general"]
    assert kept(OBSERVED.longest_row + 1, TPU) == ["dot_general", "dot_general"]
    assert kept(OBSERVED.longest_row + 1, GPU) == kept(OBSERVED.longest_row, GPU)


def test_long_rows_of_other_than_a_softmax_are_stored_as_short_ones() -> None:
    def residual_and_norm(x: Any, w: Any, v: Any) -> Any:
        y = x + x @ w
        y = y - jnp.mean(y, axis=-1, keepdims=True)
        z = jnp.tanh(y @ w)
        return y + z @ w, z @ v

    def kept(width: int) -> list[str]:
        sizes = ((8, width), (width, width), (width, 4))
        args = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in sizes)
        return materialised(residual_and_norm, *args, fusing=TPU)

    assert kept(2 * OBSERVED.longest_row) == kept(OBSERVED.longest_row)


def test_a_loop_makes_its_broadcasts_itself_on_tpu() -> None:
    def masked(x: Any) -> Any:
        zeros = jnp.zeros((64, 64))

        def body(y: Any, _: None) -> Any:
            return jnp.where(y > 0, y, zeros), None

        return jax.lax.scan(body, x, None, length=4)[0]

    program = trace(masked, (X,), {}).program
    assert "broadcast_in_dim" in [op.name for op in program.ops]
    assert "broadcast_in_dim" not in materialised(masked, X, fusing=TPU)
    assert "broadcast_in_dim" in materialised(masked, X, fusing=GPU)


def scanned(weights: Any, x: Any) -> Any:
    def body(y: Any, w: Any) -> Any:
        return y @ w.astype(jnp.bfloat16), y.sum()

    return jax.lax.scan(body, x, weights)


STACK = (jnp.ones((4, 64, 64), jnp.float32), jnp.ones((64, 64), jnp.bfloat16))


def test_what_a_loop_stacks_up_is_there_from_its_start() -> None:
    graph = inline_regions(trace(scanned, STACK, {}).program)
    live = analyse(graph, PLAIN)
    (stack,) = [n for n in graph.nodes if n.kind is NodeKind.STACK]
    (dot,) = [n for n in graph.nodes if n.op and n.op.name == "dot_general"]
    (port,) = stack.ports
    assert live.first[port.id] < dot.time < stack.time <= live.last[port.id]


def test_a_donated_argument_is_updated_in_place() -> None:
    def update(w: Any, x: Any) -> Any:
        return w - 0.1 * (x @ x)

    def is_freed_first(donated: tuple[int, ...]) -> bool:
        """Whether the old weight's buffer is free when the new one is written."""
        program = trace(update, (X, X), {}, donate_argnums=donated).program
        graph = inline_regions(program)
        live = analyse(graph, PLAIN)
        old = graph.held[program.inputs[0].value]
        new = graph.held[program.body.outputs[0]]
        return live.last[old.id] < live.first[new.id]

    assert is_freed_first((0,))
    assert not is_freed_first(())


def test_weights_that_loops_convert_are_converted_once_on_tpu() -> None:
    def loss(weights: Any, x: Any) -> Any:
        @jax.checkpoint
        def body(y: Any, w: Any) -> Any:
            return jnp.sin(y @ w.astype(jnp.bfloat16)), None

        return jax.lax.scan(body, x, weights)[0].astype(jnp.float32).sum()

    graph = inline_regions(trace(jax.grad(loss), STACK, {}).program)
    slices = [n for n in graph.nodes if n.kind is NodeKind.SLICE]
    weights = [n.id for n in slices if graph.program.values[n.value].dtype == "float32"]
    assert len(weights) == 2  # forward and backward
    (copy,) = analyse(graph, TPU).copies
    assert copy.whole_bytes == 4 * 64 * 64 * 2
    assert copy.node == weights[0]
    assert copy.stop == graph.loop_end[weights[1]]
    assert analyse(graph, GPU).copies == ()


def test_weights_that_a_loop_reads_as_they_are_are_not_converted() -> None:
    def both(weights: Any, x: Any) -> Any:
        def body(y: Any, w: Any) -> Any:
            return y @ w.astype(jnp.bfloat16), w.sum()

        return jax.lax.scan(body, x, weights)

    graph = inline_regions(trace(both, STACK, {}).program)
    assert analyse(graph, TPU).copies == ()


def test_a_weights_gradient_keeps_what_it_reads_to_the_loops_end() -> None:
    def loss(weights: Any, x: Any) -> Any:
        @jax.checkpoint
        def body(y: Any, w: Any) -> Any:
            return jnp.sin(y @ w) @ w, None

        return jax.lax.scan(body, x, weights)[0].sum()

    graph = inline_regions(trace(jax.grad(loss), (STACK[0], X), {}).program)
    dots = [n for n in graph.nodes if n.op is not None and n.op.name == "dot_general"]
    late = find_late(graph, analyse(graph, PLAIN).slack)
    # Forward: two. Backward: one again, two gradients of x, two of w, of which the
    # first could run before the last gradient of x.
    assert len(dots) == 7
    (dot,) = late
    assert late[dot] == max(graph.loop_end.values())
    live = analyse(graph, PLAIN)
    for edge in graph.edges:
        if edge.target == dot:
            assert live.last[edge.source.id] == late[dot]


def test_a_weights_gradient_before_a_loop_runs_after_it_though_it_is_converted() -> (
    None
):
    def loss(head: Any, weights: Any, x: Any) -> Any:
        def body(y: Any, w: Any) -> Any:
            return jnp.sin(y @ w.astype(y.dtype)), None

        y, _ = jax.lax.scan(body, x, weights)
        logits = (y @ head.astype(y.dtype)).astype(jnp.float32)
        return jax.nn.logsumexp(logits, axis=-1).sum()

    def step(head: Any, weights: Any, x: Any) -> Any:
        grads = jax.grad(loss, (0, 1))(head, weights, x)
        return head - grads[0], weights - grads[1]

    args = X, STACK[0], X.astype(jnp.bfloat16)
    graph = inline_regions(trace(step, args, {}).program)
    late = find_late(graph, analyse(graph, PLAIN).slack)
    outside = [n for n in late if n not in graph.loop_end and graph.nodes[n].count == 1]
    assert [late[n] for n in outside] == [max(graph.loop_end.values())]


IN_PLACE = Fusing(stacks_in_place=True)
COPIES = Fusing(copies_stacks=True, stacks_in_place=True)


@pytest.mark.parametrize(
    ("body", "passes", "passes_of_copies"),
    [
        (lambda y, w: (y, w + 1.0), {}, {NodeKind.STACK: 2}),
        (lambda y, w: (y, y @ w), {}, {NodeKind.SLICE: 2, NodeKind.STACK: 3}),
        (
            lambda y, w: (y @ w + (z := jnp.sin(w)), z),
            {NodeKind.STACK: 2},
            {NodeKind.SLICE: 2, NodeKind.STACK: 3},
        ),
        (
            lambda y, w: (jnp.sort(w) + w, None),
            {NodeKind.SLICE: 2},
            {NodeKind.SLICE: 2},
        ),
        # A product is written to the stack, too.
        (
            lambda y, w: (jnp.sort(z := y @ w), z),
            {NodeKind.STACK: 1},
            {NodeKind.SLICE: 2, NodeKind.STACK: 3},
        ),
        # The second reader compares once more.
        (
            lambda y, w: (y + (z := jnp.where(w > 0, 1.0, 0.0)), z),
            {},
            {NodeKind.STACK: 2},
        ),
    ],
    ids=[
        "elementwise",
        "product",
        "read by an op of a later level",
        "read by a sort",
        "a product that others read",
        "recomputed",
    ],
)
def test_slices_are_copied_out_of_stacks_and_into_them(
    body: Callable[..., Any],
    passes: dict[NodeKind, int],
    passes_of_copies: dict[NodeKind, int],
) -> None:
    def fn(weights: Any, x: Any) -> Any:
        return jax.lax.scan(body, x, weights)

    graph = inline_regions(trace(fn, (STACK[0], X), {}).program)
    for fusing, wanted in ((IN_PLACE, passes), (COPIES, passes_of_copies)):
        found = analyse(graph, fusing).stack_passes
        kinds = {graph.nodes[n].kind: k for n, k in found.items()}
        # A carry that no trip changes is an argument that is a result.
        kinds.pop(NodeKind.OUTPUT, None)
        assert kinds == wanted


@pytest.mark.parametrize(
    ("stacked", "is_held"),
    [(lambda y, w: jnp.where(w > 0, 1.0, 0.0), False), (lambda y, w: y @ w, True)],
    ids=["elementwise", "product"],
)
def test_an_elementwise_value_that_is_stacked_has_no_buffer_of_its_own(
    stacked: Callable[..., Any], is_held: bool
) -> None:
    def fn(weights: Any, x: Any) -> Any:
        return jax.lax.scan(lambda y, w: (y, stacked(y, w)), x, weights)

    graph = inline_regions(trace(fn, (STACK[0], X), {}).program)
    live = analyse(graph, IN_PLACE)
    (port,) = (
        e.source.id for e in graph.edges if graph.nodes[e.target].kind is NodeKind.STACK
    )
    assert live.is_materialised[port]
    assert live.is_held[port] == is_held
    assert analyse(graph, PLAIN).is_held[port]


@pytest.mark.parametrize(
    ("body", "is_copied"),
    [
        (lambda y: y + jnp.roll(y, 1, 0), True),
        (lambda y: 2.0 * y, False),
        # The product has read all of it before the carry is written.
        (lambda y: jnp.roll(y, 1, 0) @ y, False),
        (lambda y: y + jnp.pad(y[1:], ((0, 1), (0, 0))), True),
        (lambda y: y + jnp.repeat(y[::2], 2, 0), True),
        (lambda y: y + jnp.pad(y[1:], ((0, 1), (0, 0))) @ y, False),
    ],
    ids=["shifted", "elementwise", "product", "padded", "in steps", "added product"],
)
def test_a_carry_that_its_own_fusion_reads_shifted_is_copied(
    body: Callable[[Any], Any], is_copied: bool
) -> None:
    def fn(x: Any) -> Any:
        return jax.lax.scan(lambda y, _: (body(y), None), x, None, length=3)[0]

    program = trace(fn, (X,), {}).program
    for fuses_rotations in (False, True):
        graph = inline_regions(program, fuses_rotations=fuses_rotations)
        passes = analyse(graph, PLAIN).stack_passes
        assert list(passes.values()) == [2] * (is_copied and fuses_rotations)


def test_nothing_but_its_output_is_put_in_the_place_of_a_donated_input() -> None:
    def step(x: Any) -> Any:
        return jnp.sin(jnp.cos(x @ x) @ x)

    traced = trace(step, (X,), {}, donate_argnums=(0,))
    graph = inline_regions(traced.program)
    live = analyse(graph, PLAIN)
    (output,), entry = graph.output_ports, graph.nodes[0].ports[0]
    assert output is not None
    assert live.last[entry.id] == live.first[output.id] - 1
