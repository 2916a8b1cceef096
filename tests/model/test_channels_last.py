"""Convolutions read and write channels last, whatever a collective sends first."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from rhino_jax.analysis.program_analysis import ProgramAnalysis
from rhino_jax.frontend.trace import trace
from rhino_jax.hardware.files import load_target
from rhino_jax.ir.spec import Spec
from rhino_jax.ir.traits import OpKind
from rhino_jax.model.build import MeshModel
from rhino_jax.planner.search.mesh_problem import build_mesh_problem
from rhino_jax.planner.search.records import Request


AXES = (("data", 4), ("model", 2))
TARGET = load_target("h100:8")
X = jax.ShapeDtypeStruct((64, 32, 32, 128), jax.numpy.bfloat16)
W = jax.ShapeDtypeStruct((1, 1, 128, 128), jax.numpy.bfloat16)
BYTES = 2 * 64 * 32 * 32 * 128
BATCH: Spec = ((0,), (), (), ())
CHANNELS: Spec = ((), (), (), (0,))
WHOLE: Spec = ((), (), (), ())


def conv(x: jax.Array, w: jax.Array) -> jax.Array:
    return jax.lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def model_of(fn: Any, *, calls_cudnn: bool) -> MeshModel:
    program = trace(fn, (X, W, W), {}).program
    target = TARGET.replace(calls_cudnn=calls_cudnn)
    request = Request(memory_budget_bytes=1e12, pins={}, output_pins={})
    analysis = ProgramAnalysis.of(program, target)
    return build_mesh_problem(analysis, AXES, request).model


def nodes_of(model: MeshModel, kind: OpKind) -> list[int]:
    nodes = model.graph.nodes
    return [n.id for n in nodes if n.op is not None and n.op.traits.kind is kind]


def kernel_s(shards: int) -> float:
    rate = TARGET.device.hbm_bytes_per_s * TARGET.device.memory_efficiency
    return TARGET.device.launch_s + 2 * BYTES / shards / rate


def added_s(fn: Any, source: int, target: int) -> dict[tuple[Spec, Spec], float]:
    """(have, want) of the edge between two convolutions → what is added to it."""
    models = [model_of(fn, calls_cudnn=calls) for calls in (True, False)]
    nodes = nodes_of(models[0], OpKind.CONVOLUTION)
    ends = nodes[source], nodes[target]
    tables = [
        e.table for m in models for e in m.problem.edges if (e.source, e.target) == ends
    ]
    more = tables[0] - tables[1]
    have, want = (models[0].options[n].strategies for n in ends)
    return {
        (a.results[0], b.operands[0]): float(more[i, k])
        for i, a in enumerate(have)
        for k, b in enumerate(want)
    }


def chain(x: Any, w0: Any, w1: Any) -> Any:
    return conv(conv(x, w0), w1)


@pytest.fixture(scope="module")
def between() -> dict[tuple[Spec, Spec], float]:
    return added_s(chain, 0, 1)


def test_channels_are_parted_where_a_convolution_made_them(
    between: dict[tuple[Spec, Spec], float],
) -> None:
    assert between[BATCH, CHANNELS] == pytest.approx(kernel_s(4))


def test_channels_are_joined_where_a_convolution_reads_them(
    between: dict[tuple[Spec, Spec], float],
) -> None:
    assert between[CHANNELS, BATCH] == pytest.approx(kernel_s(4))
    assert between[CHANNELS, WHOLE] == pytest.approx(kernel_s(1))


def test_a_batch_lies_in_blocks(between: dict[tuple[Spec, Spec], float]) -> None:
    free = (BATCH, WHOLE), (BATCH, BATCH), (WHOLE, BATCH), (WHOLE, CHANNELS)
    assert [between[pair] for pair in free] == pytest.approx([0.0] * 4)


def test_elementwise_ops_do_it_for_nothing() -> None:
    def fn(x: Any, w0: Any, w1: Any) -> Any:
        return conv(jax.numpy.tanh(conv(x, w0)), w1)

    models = [model_of(fn, calls_cudnn=calls) for calls in (True, False)]
    (tanh,) = (
        n.id
        for n in models[0].graph.nodes
        if n.op is not None and n.op.traits.kind is OpKind.ELEMENTWISE
    )
    tables = [
        [e.table for e in m.problem.edges if e.target == tanh and e.source != tanh]
        for m in models
    ]
    more = tables[0][0] - tables[1][0]
    outs = [s.results[0] for s in models[0].options[tanh].strategies]
    made = [
        s.results[0]
        for s in models[0]
        .options[nodes_of(models[0], OpKind.CONVOLUTION)[0]]
        .strategies
    ]
    to_batch = [k for k, s in enumerate(outs) if s == BATCH]
    from_channels = [k for k, s in enumerate(made) if s == CHANNELS]
    assert not more[np.ix_(from_channels, to_batch)].any()


def test_partial_sums_are_parted_before_they_are_scattered() -> None:
    with_, without = (model_of(chain, calls_cudnn=c) for c in (True, False))
    node = nodes_of(with_, OpKind.CONVOLUTION)[0]
    more = with_.options[node].cost_s - without.options[node].cost_s
    seen = {
        s.results[0]: seconds
        for s, seconds in zip(with_.options[node].strategies, more, strict=True)
        if s.partial == (0,) and s.made[0] == WHOLE
    }
    assert seen[CHANNELS] == pytest.approx(kernel_s(1))
    assert seen[BATCH] == seen[WHOLE] == 0
