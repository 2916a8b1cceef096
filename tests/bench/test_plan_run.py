"""Suites that only plan: measured in processes, medians in the table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from rhino_jax.bench import cells as cells_module
from rhino_jax.bench.cells import SuiteRun
from rhino_jax.bench.checks import BenchError
from rhino_jax.bench.methods import parse_method
from rhino_jax.bench.planning import Planner
from rhino_jax.bench.process import JobProcess, Outcome
from rhino_jax.bench.rows.plan_run import PLAN, time_row
from rhino_jax.bench.rows.row_run import RowResult
from rhino_jax.bench.rows.scale_run import (
    SCALE,
    layers_of,
    scale_plot,
    scale_row,
)
from rhino_jax.bench.rows.timed_plan import TimedPlan
from rhino_jax.bench.run import run_suite
from rhino_jax.bench.store import Store
from rhino_jax.bench.suite import parse_suite
from rhino_jax.errors import InfeasiblePlanError


SUITE = parse_suite(
    {
        "kind": "plan",
        "methods": ["fast", "best"],
        "rows": [
            {"model": "mlp-tiny", "regime": "plenty", "target": "v5e:4x4"},
            {
                "model": "gpt-tiny",
                "regime": "plenty",
                "target": "v5e:4x4",
                "mesh": {"data": 4, "model": 4},
            },
        ],
    },
    name="mine",
    file="mine.toml",
)


SMALL = replace(
    SUITE.rows[1],
    model="mlp-tiny",
    target="v5e:2x1",
    mesh=(("data", 2),),
    overrides=(("depth", 2),),
)


def measured(method: str, plan_s: float, step_s: float) -> TimedPlan:
    return TimedPlan(
        method=method,
        num_ops=1234,
        mesh={"data": 4, "model": 4},
        num_nodes=(2000, 300),
        plan_s=plan_s,
        step_s=step_s,
        gap=0.004,
        held_bytes=2**29,
        yardstick_s=plan_s / 10,
    )


def test_a_row_is_planned_within_its_share_of_memory() -> None:
    free, half = (
        Planner.of(replace(SMALL, memory_share=share)) for share in (None, 0.7)
    )
    peaks = [
        planned.plan.predicted.peak_bytes
        for planner in (free, half)
        for planned in [planner.plan(parse_method("best"))]
        if planned.plan is not None
    ]
    assert half.budget_bytes == pytest.approx(0.7 * peaks[0])
    assert peaks[1] <= half.budget_bytes < peaks[0] < free.budget_bytes


def test_a_row_without_room_is_planned_within_the_least_memory() -> None:
    none, some, free = (
        Planner.of(replace(SMALL, memory_room=room)) for room in (0.0, 0.5, 1.0)
    )
    assert none.budget_bytes < some.budget_bytes < free.budget_bytes
    for planner in (none, some, free):
        planned = planner.plan(parse_method("best"))
        assert planned.plan is not None
        assert planned.plan.predicted.peak_bytes <= planner.budget_bytes
    with pytest.raises(InfeasiblePlanError):
        # Layers that are not alike may take a few percent less than those that are.
        replace(none, budget_bytes=0.9 * none.budget_bytes)._choose("best")


def test_a_row_is_planned_by_each_method() -> None:
    row = replace(SUITE.rows[1], model="mlp-tiny", overrides=(("depth", 12),))
    for method in row.methods:
        found = time_row(replace(row, methods=(method,)))
        assert (found.method, found.mesh) == (method.name, {"data": 4, "model": 4})
        assert found.num_ops > 100 and found.num_nodes[0] > found.num_nodes[1]
        assert found.plan_s > 0 and 0 < found.step_s
        assert 0 <= found.gap < 0.051
        assert found.held_bytes > 2**26 and 0.01 < found.yardstick_s < 60


def test_a_method_without_a_plan_is_told_in_four_parts() -> None:
    row = replace(
        SUITE.rows[0], mesh=(("x", 16),), methods=(parse_method("megatron+fsdp"),)
    )
    with pytest.raises(BenchError, match=r"megatron\+fsdp gives no plan") as caught:
        time_row(row)
    error = caught.value
    assert error.where == "mlp-tiny (plenty), v5e:4x4, x=16"
    assert "a mesh of more axes" in error.numbers
    assert "method" in error.fix


def test_medians_of_processes_that_each_plan_by_one_method(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = iter([1.0, 2.0, 9.0, 4.0, 3.0, 2.5] * 2)
    jobs: list[list[str]] = []

    def run_job(
        process: Any, job: Mapping[str, Any], log: Path, timeout_s: float, stop: Any
    ) -> Outcome:
        method = job["row"].methods[0].name
        jobs.append([job["row"].model, method])
        step_s = 0.0102 if method == "fast" else 0.01
        values = measured(method, next(seconds), step_s)
        return Outcome(status="ok", values=values)

    monkeypatch.setattr(JobProcess, "run", run_job)
    monkeypatch.setattr(cells_module, "versions", lambda: {"jax": "1"})
    store = Store.open(tmp_path)
    results = run_suite(PLAN, SuiteRun(SUITE, store, lambda line: None))
    assert len(jobs) == 12 and jobs[:2] == [["mlp-tiny", "fast"], ["mlp-tiny", "best"]]
    first = results[0].found
    assert [(p.method, p.plan_s) for p in first] == [("fast", 3.0), ("best", 2.5)]
    text = PLAN.report(SUITE, results, "the command").text
    cells = "1,234 | 2,000 | 300 | 3 | 2.5 | 0.4% | 0.4% | 1.020 | 512 MiB | 0.28 |"
    assert f"| mlp-tiny | v5e:4x4 | 4 × 4 (chosen) | {cells}" in text
    assert f"| gpt-tiny | v5e:4x4 | 4 × 4 | {cells}" in text
    run_suite(PLAN, SuiteRun(SUITE, store, lambda line: None))
    assert len(jobs) == 12, "kept"


def test_one_failed_sample_of_a_row_is_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs: list[str] = []

    def run_job(process: Any, job: Mapping[str, Any], *rest: Any) -> Outcome:
        jobs.append(job["row"].model)
        if len(jobs) == 2:
            return Outcome(status="died", error="why")
        return Outcome(status="ok", values=measured("best", 1.0, 1.0))

    monkeypatch.setattr(JobProcess, "run", run_job)
    said: list[str] = []
    run = SuiteRun(SUITE, Store.open(tmp_path), said.append)
    failed, fine = run_suite(PLAN, run)
    assert failed.error == "died. why" and fine.found is not None
    assert jobs == ["mlp-tiny"] * 2 + ["gpt-tiny"] * 6
    assert "died. why" in said[1] and said[2].startswith("[7/12")
    run_suite(PLAN, SuiteRun(SUITE, run.store, said.append))
    assert jobs[8:] == ["mlp-tiny"] * 5, "the first sample is there"


def test_a_row_that_failed_keeps_its_place() -> None:
    failed = RowResult(row=SUITE.rows[0], found=None, error="died. why\nlog")
    text = PLAN.report(SUITE, [failed], "the command").text
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert "died. why" in table[-1] and len({line.count("|") for line in table}) == 1


def test_every_pass_of_a_large_cluster_is_timed_and_drawn() -> None:
    row = {"model": "mlp-tiny", "regime": "plenty", "target": ["v5e:2x1", "h100:128x8"]}
    deep = {**row, "target": "v5e:2x1", "overrides": {"depth": 2}}
    suite = parse_suite(
        {"kind": "scale", "methods": ["auto"], "rows": [row, deep]},
        name="wide",
        file="wide.toml",
    )
    assert [r.target for r in suite.rows] == ["v5e:2x1", "h100:128x8", "v5e:2x1"]
    models = {"gpt-7b": 32, "unet-base": 8, "resnet-50": 16, "mlp-tiny": 0}
    for model, layers in models.items():
        assert layers_of(replace(suite.rows[0], model=model)) == layers
    found = scale_row(suite.rows[0])
    assert {"trace", "price", "solve", "read back", "other"} <= set(found.cpu_s)
    assert min(found.cpu_s.values()) >= 0 and found.step_s > 0
    slow = replace(found, cpu_s={"solve": 31.0})
    results = [
        RowResult(row=row, found=one)
        for row, one in zip(suite.rows, (found, slow, found), strict=True)
    ]
    text = SCALE.report(suite, results, "the command").text
    assert "](wide.svg)" in text and "1 above 30" in text and "| 1,024 |" in text
    plot = ElementTree.fromstring(scale_plot(results))
    drawn = [line for line in plot.iter() if line.tag.endswith("polyline")]
    assert len(drawn) == 3, "mlp-tiny on v5e and h100, and of another depth"
