"""Kernels of convolutions' gradients are resharded before they are reversed."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rhino_jax.analysis.convolutions import find_reversals
from rhino_jax.analysis.graph import Edge, Node
from rhino_jax.analysis.program_analysis import ProgramAnalysis
from rhino_jax.frontend.trace import trace
from rhino_jax.hardware.files import load_target
from rhino_jax.hardware.target import Target
from rhino_jax.model.build import MeshModel
from rhino_jax.planner.search.driver import find
from rhino_jax.planner.search.mesh_problem import build_mesh_problem
from rhino_jax.planner.search.records import Request


AXES = (("data", 4), ("model", 2))
TARGET = load_target("h100:8")
CHANNELS = 64


def conv(x: jax.Array, w: jax.Array, stride: int) -> jax.Array:
    return jax.lax.conv_general_dilated(
        x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def step(weights: Any, x: Any) -> Any:
    """Of two convolutions of 3x3, the second with strides."""

    def loss(ws: Any) -> jax.Array:
        y = conv(jnp.tanh(conv(x, ws[0], 1)), ws[1], 2)
        return jnp.square(y).sum()

    grads = jax.grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads)


X = jax.ShapeDtypeStruct((64, 32, 32, CHANNELS), jnp.float32)
W = jax.ShapeDtypeStruct((3, 3, CHANNELS, CHANNELS), jnp.float32)


def model_on(target: Target) -> MeshModel:
    program = trace(step, ([W] * 2, X), {}, donate_argnums=0).program
    analysis = ProgramAnalysis.of(program, target)
    request = Request(memory_budget_bytes=1e12, pins={}, output_pins={})
    return build_mesh_problem(analysis, AXES, request).model


@pytest.fixture(scope="module")
def model() -> MeshModel:
    return model_on(TARGET)


def reversal(model: MeshModel) -> tuple[Node, Edge, Node]:
    """The reversal of the second kernel, its edge, and the convolution."""
    graph = model.graph
    (node,) = find_reversals(graph)
    (edge,) = graph.outgoing[node]
    return graph.nodes[node], edge, graph.nodes[edge.target]


def table_of(model: MeshModel) -> np.ndarray:
    node, _, reader = reversal(model)
    (found,) = (
        e.table
        for e in model.problem.edges
        if (e.source, e.target) == (node.id, reader.id)
    )
    return found


def test_the_gradient_is_found_and_counts_no_zeros(model: MeshModel) -> None:
    _, _, reader = reversal(model)
    assert reader.op is not None
    assert reader.op.traits.input_dilation == 4
    # As much as the convolution itself, whose rows and columns of padding count not.
    assert reader.op.flops == 2 * 64 * CHANNELS**2 * (3 * 16 - 1) ** 2


def test_a_reversal_costs_nothing_where_its_convolution_reads_it(
    model: MeshModel,
) -> None:
    node, _, _ = reversal(model)
    assert not model.options[node.id].cost_s.any()
    other = model_on(TARGET.replace(calls_cudnn=False))
    assert other.options[node.id].cost_s.all()


def test_a_kernel_that_is_resharded_behind_it_costs_arithmetic(
    model: MeshModel,
) -> None:
    apart = table_of(model) - table_of(model_on(TARGET.replace(calls_cudnn=False)))
    node, _, reader = reversal(model)
    done = [s.results[0] for s in model.options[node.id].strategies]
    read = [s.operands[1] for s in model.options[reader.id].strategies]
    device = TARGET.device
    rate = TARGET.peak_flops_per_s("float32") * device.matmul_efficiency
    for i, have in enumerate(done):
        for k, want in enumerate(read):
            if have == want:
                assert apart[i, k] == 0
            else:
                # Zeros are three of four elements.
                zeros_s = 3 * model.options[reader.id].flops[k] / rate
                assert apart[i, k] >= zeros_s + 2 * TARGET.device.launch_s


def test_plans_gather_a_kernel_once_before_it_is_reversed() -> None:
    program = trace(step, ([W] * 2, X), {}, donate_argnums=0).program
    request = Request(
        # Weights cut over all devices, which FSDP does.
        memory_budget_bytes=1e12,
        pins={k: ((), (), (0, 1), ()) for k in (0, 1)},
        output_pins={},
    )
    plan = find(program, [AXES], TARGET, request).plan()
    gathers = [c for c in plan.collectives if c.kind == "all-gather"]
    assert len(gathers) == 2
    assert all("weights[" in c.reason for c in gathers)


@pytest.mark.parametrize(("hardware", "times"), [("h100:8", 5 / 3), ("v5e:2x4", 1.0)])
def test_cudnn_multiplies_with_the_zeros_of_a_dilated_kernel(
    hardware: str, times: float
) -> None:
    """Forward and by the input, not by the kernel: 3 taps, 2 apart, are 5."""

    def fn(x: jax.Array, w: jax.Array, dilation: int) -> Any:
        def out(x: jax.Array, w: jax.Array) -> jax.Array:
            pad, numbers = [(2 * dilation, 0)], ("NWC", "WIO", "NWC")
            return jax.lax.conv_general_dilated(
                x, w, (1,), pad, rhs_dilation=(dilation,), dimension_numbers=numbers
            ).sum()

        return jax.grad(out, (0, 1))(x, w)

    args = [jax.ShapeDtypeStruct(s, jnp.float32) for s in [(8, 4096, 16), (3, 16, 16)]]
    target, found = load_target(hardware), []
    for dilation in (1, 2):
        program = trace(fn, (*args, dilation), {}, static_argnums=(2,)).program
        analysis = ProgramAnalysis.of(program, target)
        request = Request(memory_budget_bytes=1e12, pins={}, output_pins={})
        model = build_mesh_problem(analysis, AXES, request).model
        names = [n.op.name if n.op else "" for n in model.graph.nodes]
        found.append(
            [
                o.flops.max()
                for n, o in zip(names, model.options, strict=True)
                if n == "conv_general_dilated"
            ]
        )
    assert sorted(b / a for a, b in zip(*found, strict=True)) == pytest.approx(
        sorted([1.0] + [times] * (len(found[0]) - 1)), rel=0.01
    )
