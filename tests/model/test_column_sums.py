"""Sums over long columns take two kernels, and what reads them another."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from rhino_jax.analysis.matmul_depth import reduces_columns
from rhino_jax.analysis.program_analysis import ProgramAnalysis
from rhino_jax.frontend.trace import trace
from rhino_jax.hardware.files import load_target
from rhino_jax.model.build import MeshModel
from rhino_jax.planner.search.mesh_problem import build_mesh_problem
from rhino_jax.planner.search.records import Request


AXES = (("data", 4), ("model", 2))
TARGET = load_target("h100:8")
ROWS, COLUMNS = 16384, 256


def model_of(fn: Any, *, parts_columns: bool) -> MeshModel:
    x = jax.ShapeDtypeStruct((ROWS, COLUMNS), jnp.float32)
    program = trace(fn, (x,), {}).program
    analysis = ProgramAnalysis.of(program, TARGET.replace(parts_columns=parts_columns))
    request = Request(memory_budget_bytes=1e12, pins={}, output_pins={})
    return build_mesh_problem(analysis, AXES, request).model


def norm(axis: int) -> Any:
    def fn(x: jax.Array) -> jax.Array:
        return x / jnp.square(x).sum(axis, keepdims=True)

    return fn


def whole_s(model: MeshModel) -> float:
    """Compute where nothing is cut, which each op's first option is."""
    return sum(float(o.compute_s[0]) for o in model.options)


def test_what_reads_a_sum_over_columns_reads_its_operands_again() -> None:
    apart, together = (model_of(norm(0), parts_columns=p) for p in (True, False))
    rate = TARGET.device.hbm_bytes_per_s * TARGET.device.memory_efficiency
    read_s = 4 * ROWS * COLUMNS / rate
    # A kernel that reads `x` once more, and one that adds the pieces.
    assert whole_s(apart) - whole_s(together) == pytest.approx(
        read_s + 2 * TARGET.device.launch_s, rel=0.01
    )


def test_sums_over_rows_stay_in_one_kernel() -> None:
    apart, together = (model_of(norm(1), parts_columns=p) for p in (True, False))
    assert whole_s(apart) == whole_s(together)


def test_short_columns_take_one_kernel() -> None:
    apart, together = (
        model_of(lambda x: x.sum(0), parts_columns=p) for p in (True, False)
    )
    (node,) = (n for n in apart.graph.nodes if reduces_columns(n))
    more = apart.options[node.id].compute_s - together.options[node.id].compute_s
    for s, seconds in zip(apart.options[node.id].strategies, more, strict=True):
        pieces = 4 ** (0 in s.operands[0][0]) * 2 ** (1 in s.operands[0][0])
        is_long = ROWS / pieces > 4096
        assert seconds == pytest.approx(TARGET.device.launch_s * is_long)


@pytest.mark.parametrize("sums", [jnp.sum, lambda x: jnp.vdot(x, x)])
def test_long_sums_to_a_scalar_take_two_kernels(sums: Any) -> None:
    apart, together = (model_of(sums, parts_columns=p) for p in (True, False))
    assert whole_s(apart) - whole_s(together) == pytest.approx(TARGET.device.launch_s)


def test_what_waits_for_a_scalar_runs_in_another_kernel() -> None:
    waits, does_not = (
        whole_s(model_of(fn, parts_columns=False))
        for fn in (lambda x: x / jnp.sum(x), lambda x: (x / 3, jnp.sum(x)))
    )
    rate = TARGET.device.hbm_bytes_per_s * TARGET.device.memory_efficiency
    read_s = 4 * ROWS * COLUMNS / rate
    assert waits - does_not == pytest.approx(read_s + TARGET.device.launch_s, rel=0.01)
