from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import pytest

from rhino_jax.bench import cells as cells_module
from rhino_jax.bench.cells import SuiteRun
from rhino_jax.bench.process import JobProcess, Outcome
from rhino_jax.bench.rows import clock as clock_module
from rhino_jax.bench.rows.clock import (
    CLOCK,
    Clocked,
    call_overhead_s,
    clock_row,
    median_ratio,
)
from rhino_jax.bench.rows.row_run import RowResult
from rhino_jax.bench.run import run_suite
from rhino_jax.bench.store import Store
from rhino_jax.bench.suite import parse_suite
from rhino_jax.models import registry
from rhino_jax.utils.codec import from_json, to_json


SUITE = parse_suite(
    {
        "kind": "clock",
        "methods": ["dp", "megatron", "best"],
        "rows": [
            {
                "model": model,
                "regime": "plenty",
                "target": "cpu:8",
                "mesh": {"data": 4, "model": 2},
            }
            for model in ("mlp-tiny", "gpt-tiny")
        ],
    },
    name="mine",
    file="mine.toml",
)


def clocked(ratio: float) -> Clocked:
    return Clocked(
        step_s={"dp": 0.02, "megatron": 0.01, "best": 0.01 * ratio},
        ratio={"best": ratio},
        recipe="megatron",
        overhead_s=23e-6,
        num_arrays=51,
    )


def test_the_ratio_is_of_samples_taken_together() -> None:
    # A slow moment hits both: ratios 0.5, 0.5, 2.
    assert median_ratio([1, 50, 4], [2, 100, 2]) == 0.5


def test_rows_are_clocked_once_and_failures_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs: list[str] = []
    dead = {"gpt-tiny"}

    def run_job(
        process: Any, job: Mapping[str, Any], log: Path, timeout_s: float, stop: Any
    ) -> Outcome:
        model = job["row"].model
        jobs.append(model)
        if model in dead:
            return Outcome(status="died", error="why")
        return Outcome(status="ok", values=clocked(0.8))

    monkeypatch.setattr(JobProcess, "run", run_job)
    monkeypatch.setattr(cells_module, "versions", lambda: {"jax": "1"})
    store = Store.open(tmp_path)

    def run() -> list[str]:
        results = run_suite(CLOCK, SuiteRun(SUITE, store, lambda line: None))
        return [r.error or r.row.model for r in results if r.found or r.error]

    assert run() == ["mlp-tiny", "died. why"]
    dead.clear()
    assert run() == ["mlp-tiny", "gpt-tiny"]
    assert run() == ["mlp-tiny", "gpt-tiny"]
    assert jobs == ["mlp-tiny", "gpt-tiny", "gpt-tiny"]


def test_the_report() -> None:
    first, second = SUITE.rows
    results = [
        RowResult(row=first, found=clocked(0.5)),
        RowResult(row=second, found=clocked(2.0)),
    ]
    text = CLOCK.report(SUITE, results, "the command").text
    assert "| mlp-tiny | cpu:8 | megatron | 10 | 5 | 0.50 | 51 | 23 |" in text
    assert "`best` 0.50 to 2.00 (geometric mean 1.00)" in text
    failed = RowResult(row=second, found=None, error="died. why")
    lines = CLOCK.report(SUITE, [results[0], failed], "x").text.splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert "died. why" in table[-1]
    assert len({line.count("|") for line in table}) == 1
    assert CLOCK.report(SUITE, [failed, failed], "x").text


@pytest.mark.slow
def test_steps_run_and_feed_back_what_was_donated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(clock_module, "ROUNDS", 2)
    monkeypatch.setattr(clock_module, "SAMPLE_S", 0.0)
    monkeypatch.setattr(clock_module, "CALLS", 2)
    found = clock_row(SUITE.rows[0])
    assert set(found.step_s) == {"dp", "megatron", "best"}
    assert found.recipe in ("dp", "megatron") and set(found.ratio) == {"best"}
    assert all(seconds > 0 for seconds in found.step_s.values())
    assert from_json(Clocked, to_json(found)) == found


def test_overhead_is_of_all_the_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock_module, "CALLS", 3)
    args = registry.get("mlp-tiny").make_args(jax.random.key(0))
    _, num_arrays = call_overhead_s(jax.device_get(args))
    assert num_arrays == len(jax.tree.leaves(args))
