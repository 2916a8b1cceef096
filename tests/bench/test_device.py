from __future__ import annotations

from dataclasses import replace

import pytest

from rhino_jax.bench.checks import BenchError
from rhino_jax.bench.rows import device_run
from rhino_jax.bench.rows.device_run import DEVICE, MeasuredStep, device_row
from rhino_jax.bench.rows.row_run import RowResult
from rhino_jax.bench.suite import parse_suite
from rhino_jax.utils.codec import from_json, to_json


SUITE = parse_suite(
    {
        "kind": "device",
        "methods": ["best"],
        "rows": [
            {
                "model": "mlp-tiny",
                "regime": "plenty",
                "target": "cpu:8",
                "mesh": {"data": 4, "model": 2},
            }
        ],
    },
    name="mine",
    file="mine.toml",
)


@pytest.mark.slow
def test_a_step_is_predicted_compiled_and_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device_run, "SAMPLES", 2)
    monkeypatch.setattr(device_run, "SAMPLE_S", 0.0)
    found = device_row(SUITE.rows[0])
    assert min(found.predicted_s, found.priced_s, found.measured_s) > 0
    assert 0.8 < found.predicted_bytes / found.compiled_bytes < 1.25
    assert from_json(MeasuredStep, to_json(found)) == found


def test_devices_of_another_kind_are_refused() -> None:
    row = replace(SUITE.rows[0], target="h100:8")
    with pytest.raises(BenchError, match="not those of 'h100:8'") as refused:
        device_row(row)
    assert "8 devices of kind 'cpu'" in str(refused.value)


def test_the_table_holds_predictions_against_what_was_measured() -> None:
    found = MeasuredStep(
        predicted_s=0.008,
        predicted_bytes=2**31,
        priced_s=0.012,
        compiled_bytes=2**30,
        measured_s=0.010,
    )
    results = [RowResult(row=SUITE.rows[0], found=found)]
    report = DEVICE.report(SUITE, results, "command")
    assert "| mlp-tiny | cpu:8 | 8 | 12 | 10 | 0.80 | 1.20 | 2 | 1 |" in report.text
    (line,) = report.lines
    assert "predicted over compiled peak 2.00" in line
