"""Seconds of source lines, planned and compiled: which lines are wrong, and why."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import rhino_jax as rhino
from rhino_jax.plan.records import LineSpan, LineTime, Predicted, Timeline
from rhino_jax.verify.hlo.records import CompiledKernel
from rhino_jax.verify.matching.times import Place, TimeDifference, time_differences
from tests.verify.extras import mesh_of_target


A, B, C = (f"step.py:{line} (loss)" for line in (1, 2, 3))
OPS = {(A, False): "dot_general", (B, False): "tanh", (C, True): "mul"}


@pytest.fixture(scope="module")
def plan() -> rhino.Plan:
    x = jax.ShapeDtypeStruct((8, 8), "float32")
    return rhino.plan(jnp.sin, x, mesh={"x": 1}, hardware="cpu", progress=False)


def span(source: str, seconds: float, flops: float = 0.0, back: bool = False) -> Any:
    return LineSpan(source, back, 0, 0, seconds, flops, 0)


def kernel(seconds: float, *places: Place | str, **amounts: float) -> CompiledKernel:
    return CompiledKernel(
        name=f"fusion.{seconds:g}",
        ops=tuple(
            (p, "forward", "add") if isinstance(p, str) else (p[0], "backward", "add")
            for p in places
        )
        or (("", "forward", ""),),
        seconds=seconds,
        flops=amounts.get("flops", 0.0),
        bytes=amounts.get("bytes", 1.0),
    )


def compared(
    plan: rhino.Plan,
    spans: list[LineSpan],
    kernels: list[CompiledKernel],
    exposed_s: tuple[float, float] = (0.0, 0.0),
) -> tuple[TimeDifference, ...]:
    planned_s = sum(s.seconds for s in spans)
    made_s = sum(k.seconds for k in kernels)
    before = Predicted(planned_s + exposed_s[0], planned_s, exposed_s[0], 1, 1.0)
    after = Predicted(made_s + exposed_s[1], made_s, exposed_s[1], 1, 1.0)
    changed = replace(plan, predicted=before, timeline=Timeline(tuple(spans)))
    found = time_differences(changed, after, kernels, OPS)
    assert sum(d.predicted_s for d in found) == pytest.approx(before.step_time_s)
    assert sum(d.compiled_s for d in found) == pytest.approx(after.step_time_s)
    assert [abs(d.seconds) for d in found] == sorted(
        (abs(d.seconds) for d in found), reverse=True
    )
    return found


def test_fusion_alone_is_no_difference(plan: rhino.Plan) -> None:
    spans = [span(A, 8.0), span(B, 2.0), span(B, 1.0)]
    for kernels in (
        [kernel(11.0, B, A)],
        [kernel(10.0, B, A), kernel(1.0, B)],
        [kernel(1.0, B, A), kernel(2.0, B), kernel(8.0, A, B)],
    ):
        found = compared(plan, spans, kernels)
        assert all(d.seconds == pytest.approx(0.0, abs=1e-9) for d in found)


def test_what_exceeds_the_plan_goes_to_the_main_line(plan: rhino.Plan) -> None:
    found = compared(plan, [span(A, 2.0), span(B, 3.0)], [kernel(25.0, B, A)])
    assert (found[0].source, found[0].compiled_s) == (B, pytest.approx(23.0))
    # What one kernel took of a line is not expected of another.
    kernels = [kernel(5.0, A), kernel(6.0, B, A)]
    first, *_ = compared(plan, [span(A, 5.0), span(B, 1.0)], kernels)
    assert (first.source, first.seconds) == (B, pytest.approx(5.0))


def test_causes_are_named_where_they_are_certain(plan: rhino.Plan) -> None:
    spans = [
        span(A, 4.0, flops=8.0),
        span(C, 1.0, back=True),
        span("step.py:4 (loss)", 3.0),
        span("step.py:5 (loss)", 2.0, flops=8.0),
        span("step.py:6 (loss)", 1.0),
    ]
    kernels = [
        kernel(8.0, A, flops=8.0),
        kernel(4.0, B),
        kernel(5.0, (C, True), bytes=2.0**30),
        kernel(9.0, "step.py:5 (loss)", flops=32.0),
        kernel(0.5, "step.py:7 (loss)", "step.py:6 (loss)"),
        kernel(0.5, "step.py:6 (loss)"),
        kernel(0.0, "step.py:8 (loss)"),
        kernel(0.25, "step.py:9 (loss)"),
        kernel(1.5),
    ]
    causes = {d.source or d.op: d.cause for d in compared(plan, spans, kernels)}
    assert causes == {
        A: "1.00 FLOP/s, predicted 2.00 FLOP/s",
        B: "stored, though predicted fused: moves 1 B, 0 B/s",
        C: "moves 1.00 GiB, 205 MiB/s",
        "step.py:4 (loss)": "not in the compiled program",
        "step.py:5 (loss)": "computes 4.00x the FLOPs",
        "step.py:6 (loss)": "moves 2 B, 2 B/s",
        "step.py:9 (loss)": "not in the plan: moves 1 B, 4 B/s",
        "copies": "of no source line",
    }
    fused = compared(plan, [span(A, 5.0), span(B, 1.0)], [kernel(0.0, A, B)])
    assert {d.cause for d in fused} == {"fused, though predicted stored"}


def test_forward_and_backward_of_a_line_are_told_apart(plan: rhino.Plan) -> None:
    spans = [span(A, 1.0), span(A, 2.0, back=True)]
    kernels = [kernel(1.0, A), kernel(9.0, (A, True))]
    first, second, same = compared(plan, spans, kernels, exposed_s=(1.0, 2.0))
    assert first.is_backward and first.seconds == pytest.approx(7.0)
    assert second.op == "communication" and second.seconds == pytest.approx(1.0)
    assert not same.seconds and not same.is_backward


def test_plans_of_tasks_compare_lines_with_both_passes(plan: rhino.Plan) -> None:
    changed = replace(
        plan,
        predicted=Predicted(5.0, 4.0, 1.0, 1, 1.0),
        timeline=Timeline(),
        line_times=(LineTime(A, matrix_s=3.0, launch_s=1.0, communication_s=1.0),),
    )
    kernels = [kernel(1.0, A), kernel(9.0, (A, True))]
    after = Predicted(12.0, 10.0, 2.0, 1, 1.0)
    first, second = time_differences(changed, after, kernels, OPS)
    assert (first.predicted_s, first.compiled_s) == (4.0, 10.0)
    assert not first.is_backward and second.seconds == pytest.approx(1.0)


def mixed(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    h = jax.nn.relu(x @ up)
    return jnp.tanh(h @ down)


@pytest.mark.compile_only
@pytest.mark.parametrize("hardware", ["v5e:2x4", "h100:8"])
def test_the_line_that_is_estimated_wrongly_comes_first(hardware: str) -> None:
    mesh_of_target(hardware)
    shapes = ((16384, 4096), (4096, 4096), (4096, 12288))
    args = [jax.ShapeDtypeStruct(dims, "bfloat16") for dims in shapes]
    plan = rhino.plan(mixed, *args, mesh={"x": 8}, hardware=hardware, progress=False)
    true = plan.verify(mixed, *args)
    assert true.time_ok, true.table(full=True)
    line = mixed.__code__.co_firstlineno + 2
    source = f"test_times.py:{line} (mixed)"
    wrong = [
        replace(s, seconds=s.seconds / 20) if s.source == source else s
        for s in plan.timeline.spans
    ]
    step_s = sum(s.seconds for s in wrong)
    assert step_s < plan.predicted.step_time_s
    found = replace(
        plan,
        timeline=Timeline(tuple(wrong)),
        predicted=replace(plan.predicted, step_time_s=step_s, compute_s=step_s),
    ).verify(mixed, *args)
    assert found.time_ok is False and not found.ok
    assert (found.peak_ok, found.traffic_ok) == (true.peak_ok, true.traffic_ok)
    first = found.time_differences[0]
    assert (first.source, first.op) == (source, "dot_general")
    assert first.compiled_s > 10 * first.predicted_s and first.kernels
    headline, *_ = found.table().splitlines()
    assert headline.startswith("verification of mixed: not ok, predicted 0.")
    assert source in found.table() and source not in true.table().split("differ")[0]
