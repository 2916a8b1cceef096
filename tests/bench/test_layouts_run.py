"""Suites of layouts that others measured: predicted, in the same order or not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rhino_jax.bench.checks import BenchError
from rhino_jax.bench.rows.layouts_run import LAYOUTS, predict_row
from rhino_jax.bench.suite import load_suite, parse_suite


ROW = {
    "model": "mlp-tiny",
    "regime": "plenty",
    "target": "v5e:2x4",
    "mesh": {"data": 4, "model": 2},
    "methods": ["fsdp", "dp", "zero1"],
    "published_s": [2.0, 1.0],
}


def test_layouts_are_predicted_and_compared() -> None:
    (row,) = parse_suite({"kind": "layouts", "rows": [ROW]}, name="a", file="a").rows
    found = predict_row(row)
    steps = {plan.method: plan.step_s for plan in found}
    assert [*steps] == ["fsdp", "dp", "zero1"] and min(steps.values()) > 0
    lines = [*LAYOUTS.table(row, found)]
    assert lines[1]["published ÷ first"] == "0.50"
    assert lines[1]["predicted ÷ first"] == f"{steps['dp'] / steps['fsdp']:.2f}"
    assert lines[2]["published ms"] == lines[2]["published ÷ first"] == ""
    told = "1 of 1" if steps["dp"] < steps["fsdp"] else "0 of 1"
    assert told in "".join(LAYOUTS.summary("a", [(row, found)]))
    *_, more = predict_row(replace(row, microbatches=2))
    assert more.method == "zero1" and more.step_s > steps["zero1"]


def test_published_steps_are_numbers() -> None:
    table = {"kind": "layouts", "rows": [{**ROW, "published_s": ["2"]}]}
    with pytest.raises(BenchError, match="published_s"):
        parse_suite(table, name="a", file="a")
    first, second = load_suite("layouts").rows
    assert len(first.published_s) == 3 and second.microbatches == 8
