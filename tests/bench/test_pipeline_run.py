"""Suites of pipelines that are only planned."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import rhino_jax as rhino
from rhino_jax.bench.checks import BenchError
from rhino_jax.bench.command import Command, run_command
from rhino_jax.bench.methods import SCHEDULES, parse_method
from rhino_jax.bench.rows.pipeline_run import PIPELINES, plan_pipeline
from rhino_jax.bench.rows.row_run import RowResult
from rhino_jax.bench.rows.timed_plan import Plans, TimedPlan
from rhino_jax.bench.suite import load_suite, parse_suite


ROW = {
    "model": "gpt-tiny",
    "regime": "plenty",
    "target": "cpu:4",
    "stages": 2,
    "microbatches": 4,
    "methods": ["1f1b"],
}
SUITE = parse_suite({"kind": "pipelines", "rows": [ROW]}, name="mine", file="mine.toml")


def test_a_row_is_planned_as_users_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RHINO_CACHE", "0")
    row = replace(SUITE.rows[0], model="mlp-tiny")
    found = plan_pipeline(row)
    workload = row.make()
    plan = rhino.plan(
        workload.step,
        *workload.abstract_args(),
        hardware="cpu:4",
        stages=2,
        microbatches=4,
        schedule="1f1b",
        donate_argnums=workload.donate_argnums,
    )
    assert found.step_s == plan.predicted.step_time_s
    assert found.bubble == plan.simulate().bubble
    # Nothing is faster than its busiest stage.
    assert max(plan.pipeline.busy_s) == found.ideal_s < found.step_s
    assert (found.places, found.micro_batches) == ((1, 1), 4)
    assert min(found.plan_s, found.total_s, found.yardstick_s) > 0


def test_what_does_not_fit_says_so() -> None:
    (row,) = SUITE.rows
    found = plan_pipeline(replace(row, memory="10kB"))
    assert "fits in no 2 stages" in found.error and not found.step_s
    assert "fits in no 2 stages" in PIPELINES.describe([found])
    result = RowResult(row=row, found=[found])
    text = PIPELINES.report(SUITE, [result], "bench mine").text
    (line,) = [line for line in text.splitlines() if line.startswith("| gpt-tiny")]
    header = next(line for line in text.splitlines() if line.startswith("| workload"))
    assert "fits in no 2 stages" in line and line.count("|") == header.count("|")


def test_a_line_for_every_method() -> None:
    def planned(method: str, step_s: float) -> TimedPlan:
        return TimedPlan(
            method=method,
            places=(2, 1, 1),
            mesh={"stage": 4, "x": 8},
            micro_batches=16,
            schedule="1f1b",
            step_s=step_s,
            ideal_s=2.0,
            bubble=0.2,
            peak_bytes=2**30,
            plan_s=9.0,
            cpu_s={"all": 8.0},
            yardstick_s=0.25,
        )

    plans = planned("auto", 2.5), planned("1f1b", 3.0)
    methods = tuple(parse_method(plan.method) for plan in plans)
    row = replace(SUITE.rows[0], published=0.8, methods=methods)
    results = [
        RowResult(row=row, found=plans),
        RowResult(row=row, found=None, error="killed"),
    ]
    text = PIPELINES.report(SUITE, results, "bench mine").text
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("| gpt-tiny")
    ]
    assert rows[0][3:12] == [
        *("2 + 1 + 1", "8", "16", "1f1b", "2.50 s", "1.250", "20 %", "1.00 GiB"),
        "1.000",
    ]
    assert rows[1][8] == "1.500" and rows[1][11] == "1.200"
    assert (rows[0][12], rows[1][12]) == ("", "0.800")
    assert rows[2][2] == "killed"
    assert "2 plans" in text and "1.25 to 1.50" in text


def test_steps_are_compared_with_those_of_alpas_stages() -> None:
    def planned(method: str, step_s: float, error: str = "") -> TimedPlan:
        took: dict[str, Any] = {"plan_s": 9.0, "cpu_s": {"all": 8.0}}
        return TimedPlan(method=method, error=error, step_s=step_s, ideal_s=1.0, **took)

    def said(*plans: TimedPlan) -> RowResult[Plans]:
        return RowResult(row=SUITE.rows[0], found=plans)

    rows = [
        said(planned("alpa", 4.0), planned("auto", 2.0)),
        said(planned("auto", 4.0), planned("alpa", 2.0)),
        said(planned("alpa", 0.0, "does not fit"), planned("auto", 2.0)),
        said(planned("alpa", 2.0), planned("auto", 0.0, "does not fit")),
    ]
    _, over = PIPELINES.report(SUITE, rows, "bench mine").lines
    assert over == (
        "`auto`, 2 steps over those of Alpa's stages: 0.50 to 2.00 (geometric mean"
        " 1.00)."
    )
    alone = PIPELINES.report(SUITE, [said(planned("auto", 2.0))], "bench mine")
    assert len(alone.lines) == 1


def test_what_ships_names_schedules_or_leaves_them() -> None:
    every = {m.plan for row in load_suite("pipelines").rows for m in row.methods}
    assert every <= {"auto", *SCHEDULES}
    with pytest.raises(BenchError, match="schedules are methods"):
        run_command(Command(suite="pipelines", is_list=True, methods=("best",)))


def test_a_number_of_stages_is_one() -> None:
    with pytest.raises(BenchError, match="`stages`"):
        parse_suite({"rows": [{**ROW, "stages": "two"}]}, name="a", file="a.toml")
