"""Temporaries: operands of ragged products, masked, and of convolutions, padded."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import rhino_jax as rhino
from rhino_jax.analysis.fusing import Fusing
from rhino_jax.analysis.inline_regions import inline_regions
from rhino_jax.analysis.liveness import analyse
from rhino_jax.frontend.trace import trace
from rhino_jax.hardware.files import load_target
from rhino_jax.ir.traits import OpKind


ROWS, WIDTH, HIDDEN, GROUPS = 1024, 256, 512, 4
X, Y, W = (2 * n for n in (ROWS * WIDTH, ROWS * HIDDEN, GROUPS * WIDTH * HIDDEN))


def forward(x: Any, w: Any, sizes: Any) -> Any:
    return jax.lax.ragged_dot(x, w, sizes)


def gradient(x: Any, w: Any, sizes: Any) -> Any:
    """The gradients by rows and by matrices of what is linear in both."""
    y = jnp.ones((ROWS, HIDDEN), jnp.bfloat16)
    return jax.vjp(lambda x, w: forward(x, w, sizes), x, w)[1](y)


def planned(fn: Any, hardware: str, grouped: str = "as written") -> Any:
    shapes = (ROWS, WIDTH), (GROUPS, WIDTH, HIDDEN)
    args = [jax.ShapeDtypeStruct(s, "bfloat16") for s in shapes]
    sizes = jax.ShapeDtypeStruct((GROUPS,), "int32")
    asked = {"mesh": {"x": 1}, "hardware": hardware, "progress": False}
    asked["grouped"] = grouped
    return rhino.plan(fn, *args, sizes, level="fast", **asked).predicted


def test_every_group_is_multiplied_in_full_with_masked_rows() -> None:
    one = 2.0 * ROWS * WIDTH * HIDDEN
    found = planned(forward, "h100:1")
    assert found.flops_per_device == GROUPS * one
    assert found.peak_bytes == pytest.approx(X + W + Y + GROUPS * X, rel=0.01)
    both = planned(gradient, "h100:1")
    assert both.flops_per_device == 2 * GROUPS * one
    # By matrices: rows and what comes back, masked; by rows: that in another order of
    # dims; and the matrices moved.
    held = X + W + X + W + GROUPS * (X + 2 * Y)
    assert held <= both.peak_bytes <= 1.01 * (held + W + Y)


def test_a_kernel_that_skips_other_groups_visits_a_tile_for_each_in_it() -> None:
    found = planned(forward, "v5e:1x1")
    visited = ROWS + GROUPS * 128
    assert found.flops_per_device == 2.0 * visited * WIDTH * HIDDEN
    assert found.peak_bytes == pytest.approx(X + W + Y, rel=0.01)


def test_a_kernel_of_tiles_multiplies_whole_tiles_without_masked_rows() -> None:
    one = 2.0 * WIDTH * HIDDEN
    found = planned(forward, "h100:1", "auto")
    # Tiles of 128 rows, of the 256 of a group; half a tile more for each group.
    assert found.flops_per_device == one * (ROWS + GROUPS * 127 / 2)
    assert found.peak_bytes == pytest.approx(X + W + Y, rel=0.01)
    both = planned(gradient, "h100:1", "auto")
    by_matrices = ROWS + GROUPS * 63 / 2
    assert both.flops_per_device == one * (ROWS + GROUPS * 127 / 2 + by_matrices)
    assert both.peak_bytes <= 1.01 * (2 * (X + W) + Y)


@pytest.mark.parametrize("rows", [1, 8, 100, 4096])
@pytest.mark.parametrize("groups", [2, 64])
def test_it_is_faster_at_every_shape(rows: int, groups: int) -> None:
    S = jax.ShapeDtypeStruct
    args = S((rows, 512), "bfloat16"), S((groups, 512, 256), "bfloat16")
    sizes = S((groups,), "int32")

    def step_s(grouped: str) -> float:
        asked = {"mesh": {"x": 1}, "hardware": "h100:1", "progress": False}
        plan = rhino.plan(forward, *args, sizes, level="fast", grouped=grouped, **asked)
        return plan.predicted.step_time_s

    assert step_s("auto") <= step_s("as written")


@pytest.mark.parametrize(("stride", "copies"), [(1, 0), (2, 1)])
def test_cudnn_reads_a_padded_copy_where_a_window_pads_one_end_more(
    stride: int, copies: int
) -> None:
    def conv(x: Any, w: Any) -> Any:
        numbers = "NHWC", "HWIO", "NHWC"
        strides = stride, stride
        return jax.lax.conv_general_dilated(
            x, w, strides, "SAME", dimension_numbers=numbers
        )

    def step(x: Any, w: Any) -> Any:
        y, pull = jax.vjp(lambda w: conv(x, w), w)
        return pull(jnp.tanh(y))

    x, w = jnp.ones((8, 32, 32, 16)), jnp.ones((3, 3, 16, 16))
    graph = inline_regions(trace(step, (x, w), {}).program)
    forward, gradient = (
        node.time
        for node in graph.nodes
        if node.op is not None and node.op.traits.kind is OpKind.CONVOLUTION
    )
    for hardware, found in (("h100", copies), ("v5e", 0)):
        live = analyse(graph, Fusing.of(load_target(hardware).device))
        spans = [(m.operand, m.start, m.stop) for m in live.masked]
        assert spans == [(0, forward, gradient)] * found
