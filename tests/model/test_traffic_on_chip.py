"""Prices of values on the chip, and of elementwise arithmetic on a TPU."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from rhino_jax.analysis.graph import NodeKind
from rhino_jax.analysis.program_analysis import ProgramAnalysis
from rhino_jax.frontend.trace import trace
from rhino_jax.hardware.files import load_target
from rhino_jax.planner.search.mesh_problem import build_mesh_problem
from rhino_jax.planner.search.records import Request


TPU = load_target("v6e:2x2").replace(launch_s=0.0)


def seconds(fn: Any, *args: Any, target: Any = TPU) -> list[float]:
    """Return the seconds of every op, with all dims sharded as little as possible."""
    analysis = ProgramAnalysis.of(trace(fn, args, {}).program, target)
    request = Request(memory_budget_bytes=1e12, pins={}, output_pins={})
    model = build_mesh_problem(analysis, (("x", 4),), request).model
    return [
        float(model.options[node.id].compute_s.max())
        for node in model.graph.nodes
        if node.kind is NodeKind.OP
    ]


def array(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def test_sums_of_what_stays_take_less() -> None:
    def step(x: Any) -> Any:
        return jnp.sort(x, axis=-1).sum(-1)

    small, large = array(4096, 1024), array(4 * 4096, 8 * 1024)
    off = TPU.replace(on_chip_bytes=0)
    for x, is_faster in ((small, True), (large, False)):
        on, without = (seconds(step, x, target=t)[-1] for t in (TPU, off))
        assert (on < without) is is_faster


@pytest.mark.parametrize(
    ("fn", "dtype", "item_bytes"),
    [(lambda x: x + 1, jnp.float32, 8), (lambda x: x + 1, jnp.bfloat16, 8),
     (jnp.tanh, jnp.float32, 8), (lambda x: x.sum(-1), jnp.float32, 8),
     (lambda x: x * jnp.exp(x[:, :1]), jnp.bfloat16, 8),
     (lambda x: x.astype(jnp.float32).sum(-1), jnp.bfloat16, 6)],
)  # fmt: skip
def test_kernels_take_one_more_pass_unless_they_store_float32(
    fn: Any, dtype: Any, item_bytes: int
) -> None:
    device, x = TPU.device, jax.ShapeDtypeStruct((65_536, 4096), dtype)
    rate = device.hbm_bytes_per_s * device.memory_efficiency
    assert sum(seconds(fn, x)) == pytest.approx(item_bytes * x.size / rate, rel=0.01)


def test_a_matmuls_fusion_computes_its_activation_at_once() -> None:
    x, w = array(8192, 1024), array(1024, 1024)
    _, special = seconds(lambda x, w: jnp.tanh(x @ w), x, w)
    _, plain = seconds(lambda x, w: -(x @ w), x, w)
    assert special == plain


def test_products_read_what_stays_at_the_rate_of_writes() -> None:
    """A vector unit reads on-chip memory more slowly than a matrix unit does."""
    slow, fast = 1e12, 1e15
    targets = [
        TPU.replace(on_chip_bytes_per_s=slow, on_chip_peak_bytes_per_s=peak)
        for peak in (None, fast)
    ]

    def step(x: Any, w: Any) -> Any:
        return (jnp.sort(x, axis=-1) @ w).sum()

    x, few = array(8192, 1024), array(1024, 8)
    found = [seconds(step, x, few, target=t) for t in targets]
    sorting, product, *_ = zip(*found, strict=True)
    kept = x.size * 4
    assert sorting[0] > sorting[1]
    assert product[0] - product[1] == pytest.approx(kept / slow, rel=0.1)

    def summed(x: Any) -> Any:
        return jnp.sort(x, axis=-1).sum(-1)

    _, read = zip(*(seconds(summed, x, target=t) for t in targets), strict=True)
    assert read[0] == read[1]


def test_what_an_epilogue_moves_is_hidden_behind_its_products() -> None:
    """It takes the longer of both, and a sum over devices before it parts them."""
    x, w, y = array(8192, 1024), array(1024, 1024), array(8192, 1024)
    target = TPU.replace(on_chip_bytes=0)

    def step(x: Any, w: Any, y: Any) -> Any:
        return jnp.tanh(x @ w) + y

    def of(options: Any, share: float, *, is_partial: bool) -> float:
        """Return the seconds of a share of the rows and columns, or of partial sums."""
        flops = 2 * x.size * 1024 * share
        return min(
            float(s)
            for s, f, strategy in zip(
                options.compute_s, options.flops, options.strategies, strict=True
            )
            if f == flops and bool(strategy.partial) is is_partial
        )

    analysis = ProgramAnalysis.of(trace(step, (x, w, y), {}).program, target)
    request = Request(memory_budget_bytes=1e12, pins={}, output_pins={})
    model = build_mesh_problem(analysis, (("x", 4),), request).model
    nodes = [n for n in model.graph.nodes if n.kind is NodeKind.OP]
    matmul, *others = (model.options[n.id] for n in nodes)
    assert all((o.compute_s == 0).all() for o in others)
    rate = target.device.hbm_bytes_per_s * target.device.memory_efficiency
    read = (x.size + 4 * w.size + y.size + x.size) * 4 / 4 / rate
    assert of(matmul, 0.25, is_partial=False) == pytest.approx(read, rel=0.01)
    # Scattered, the sum is read by a kernel that also reads y and writes the result.
    partial = (x.size + w.size) * 4 / 4 + 3 * x.size * 4 / 4
    assert of(matmul, 0.25, is_partial=True) == pytest.approx(partial / rate, rel=0.05)
