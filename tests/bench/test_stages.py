"""Suites that run pipelines: what rows may say, and what is reported."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rhino_jax.bench.checks import BenchError
from rhino_jax.bench.records import row_key
from rhino_jax.bench.rows import stages_run as run
from rhino_jax.bench.rows.row_run import RowResult
from rhino_jax.bench.rows.stages_run import STAGES, Case, Piped
from rhino_jax.bench.suite import load_suite, parse_suite
from rhino_jax.plan.stages import Between, Pipeline, StageCost, StageHop
from rhino_jax.utils.codec import from_json, to_json


ROW = {
    "model": "gpt-tiny-unrolled",
    "regime": "plenty",
    "target": "cpu:2",
    "microbatches": 4,
    "methods": ["1f1b"],
}
SUITE = parse_suite({"kind": "stages", "rows": [ROW]}, name="a", file="a.toml")


def case(measured_s: float, simulated_s: float) -> Case:
    return Case(
        schedule="1f1b",
        task_s=0.01,
        apart_s=measured_s,
        apart_simulated_s=simulated_s,
        apart_hosted_s=1.1 * simulated_s,
        host_s=0.001,
        together_s=2 * measured_s,
        together_simulated_s=simulated_s,
    )


def test_the_suite_has_twenty_cases() -> None:
    suite = load_suite("stages")
    assert suite.kind == "stages"
    assert sum(len(row.methods) for row in suite.rows) == 20
    assert all(row.microbatches for row in suite.rows)


def test_rows_say_their_micro_batches() -> None:
    (row,) = SUITE.rows
    assert row.workload == "gpt-tiny-unrolled m=4"
    assert parse_suite({"rows": [row.to_table()]}, name="b", file="").rows == (row,)
    assert row_key(row) != row_key(replace(row, microbatches=8))
    for wrong in (-1, 2.0, True, "4"):
        with pytest.raises(BenchError, match="`microbatches` is not a number"):
            bad = {"rows": [{**ROW, "microbatches": wrong}]}
            parse_suite(bad, name="a", file="a.toml")


def test_what_cannot_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    (row,) = SUITE.rows
    monkeypatch.setattr(run.os, "sched_getaffinity", lambda _: {0, 1})
    wrong = parse_suite(
        {"rows": [{**ROW, "methods": ["best"]}]}, name="a", file=""
    ).rows[0]
    for bad in (wrong, replace(row, microbatches=0), replace(row, target="cpu:4")):
        with pytest.raises(BenchError, match="stages have a core each"):
            run.run_stages(bad)


def test_measured_seconds_take_the_place_of_planned_ones() -> None:
    cost = StageCost(
        forward_s=1.0,
        backward_s=1.0,
        update_s=1.0,
        activation_bytes=5,
        fixed_bytes=6,
        weights_s=0.0,
        working_bytes=7,
    )
    pipeline = Pipeline(
        micro_batches=2,
        schedule="1f1b",
        runs=(),
        costs=(cost, cost),
        hops=(StageHop(0, 1, 1, 1, 1.0, 1.0),),
        between=(Between(9.0, ((1, 8),)), Between(9.0)),
    )
    tasks = [
        ["START", 0, 0, 0.5],
        ["FORWARD", 0, 0, 0.1],
        ["BACKWARD", 0, 0, 0.2],
        ["FORWARD", 1, 1, 0.3],
        ["BACKWARD", 1, 1, 0.4],
        ["BETWEEN", 0, 0, 0.8],
        ["UPDATE", 1, 0, 0.6],
        ["UPDATE", 1, 1, 0.1],
    ]
    measured = run.measured_pipeline(pipeline, tasks)
    first, second = measured.costs
    assert first == replace(cost, forward_s=0.1, backward_s=0.2, update_s=0.5)
    assert second.forward_s == 0.3 and second.update_s == pytest.approx(0.7)
    assert measured.between == (Between(0.8, ((1, 8),)), Between(0.0))


def test_what_a_core_does_beside_tasks_makes_these_longer() -> None:
    cost = StageCost(
        forward_s=0.1,
        backward_s=0.2,
        update_s=0.5,
        activation_bytes=5,
        fixed_bytes=6,
        weights_s=0.0,
        working_bytes=7,
    )
    pipeline = Pipeline(
        micro_batches=2, schedule="1f1b", runs=(), costs=(cost, cost), hops=()
    )
    tasks = [
        [kind, group, group, s]
        for group in (0, 1)
        for kind, s in (("FORWARD", 0.1), ("BACKWARD", 0.2), ("UPDATE", 0.5))
    ]
    # Tasks take 2 (0.1 + 0.2) + 0.5 = 1.1 s of each core.
    host_s = run.host_seconds(pipeline, tasks, [1.5, 1.0])
    assert host_s == [pytest.approx(0.1), 0.0]
    first, second = run.with_host(pipeline, host_s).costs
    assert first.forward_s == pytest.approx(0.2)
    assert first.backward_s == pytest.approx(0.3)
    assert (first.weights_s, first.update_s) == (0.0, 0.5)
    assert second == cost


def test_ratios_are_told_with_the_rows_that_failed() -> None:
    (row,) = SUITE.rows
    found = Piped(one_device_s=0.3, cases=(case(0.2, 0.18), case(0.2, 0.22)))
    assert from_json(Piped, to_json(found)) == found
    results: list[RowResult[Piped]] = [
        RowResult(row=row, found=found),
        RowResult(row=row, found=None, error="died. why"),
    ]
    text = STAGES.report(SUITE, results, "the command").text
    lines = [line for line in text.splitlines() if line.startswith("| gpt")]
    assert len(lines) == 3 and "| 200 | 0.90 | 0.99 | 1.50 | 400 | 0.45 |" in lines[0]
    assert "died. why" in lines[2]
    (said,) = STAGES.report(SUITE, results, "the command").lines
    assert "0.90 to 1.10" in said and "0.45 to 0.55" in said
    assert "0.99 to 1.21" in said
    failed = STAGES.report(SUITE, results[1:], "x")
    assert failed.lines == () and failed.failed == 1


@pytest.mark.slow
def test_a_row_runs_in_processes_and_in_one() -> None:
    (row,) = SUITE.rows
    found = run.run_stages(row)
    (one,) = found.cases
    assert found.one_device_s > 0
    # Far apart: tasks of a millisecond on a machine that does other things.
    assert 0.05 < one.apart_ratio < 5 and 0.05 < one.together_ratio < 5
    assert 0 < one.task_s < one.apart_simulated_s <= one.apart_hosted_s
