"""Scatters, and indices of loops, as compilers fuse them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from helpers_stored import stored

from rhino_jax.analysis.fusing import Fusing
from rhino_jax.analysis.graph import Graph, NodeKind
from rhino_jax.analysis.inline_regions import inline_regions
from rhino_jax.analysis.liveness import Liveness, analyse
from rhino_jax.frontend.trace import trace
from rhino_jax.hardware.files import load_target


X = jnp.ones((64, 64), jnp.float32)


def analysed(
    fn: Callable[..., Any], *args: Any, hardware: str
) -> tuple[Graph, Liveness]:
    device = load_target(hardware).device
    graph = inline_regions(trace(fn, args, {}).program, **device.inlining)
    return graph, analyse(graph, Fusing.of(device))


def found(fn: Callable[..., Any], *args: Any, hardware: str) -> list[str]:
    """Names of the ops whose results are stored."""
    return stored(*analysed(fn, *args, hardware=hardware))


def test_scatters_write_into_zeros_in_memory_or_begin_with_zeros() -> None:
    def segments(x: Any, rows: Any) -> Any:
        return jax.ops.segment_sum(x * x, rows, 16)

    args = X, jnp.zeros((64,), jnp.int32)
    assert found(segments, *args, hardware="h100")[-2:] == [
        "broadcast_in_dim",
        "scatter-add",
    ]
    assert found(segments, *args, hardware="v5e")[-1:] == ["scatter-add"]
    assert "broadcast_in_dim" not in found(segments, *args, hardware="v5e")


def test_a_tpu_computes_what_it_adds_to_few_zeros_in_the_scatter() -> None:
    def segments(number: int) -> list[str]:
        def fn(x: Any, rows: Any) -> Any:
            return jax.ops.segment_sum(x * x, rows, number)

        return found(fn, X, jnp.zeros((64,), jnp.int32), hardware="v5e")

    assert "mul" not in segments(16)
    assert "mul" in segments(4096)  # sorted first


def test_numbers_of_a_scan_are_sliced_by_a_kernel_on_tpu() -> None:
    def scaled(x: Any, scales: Any) -> Any:
        return jax.lax.scan(lambda x, s: (x * s, None), x, scales)[0]

    for hardware, is_kernel in (("v5e", True), ("h100", False)):
        graph, live = analysed(scaled, X, jnp.ones(8), hardware=hardware)
        (slice_,) = [n.id for n in graph.nodes if n.kind is NodeKind.SLICE]
        assert (slice_ in live.stack_passes) == is_kernel
