"""Unrolled layers as XLA:GPU compiles them, beside the loops that they were.

With `python -m pytest -s -m "slow and compile_only"` both are printed.
"""

from __future__ import annotations

from typing import Any

import pytest

import rhino_jax as rhino
from rhino_jax.models import registry
from tests.verify.extras import skipped_without_extra


@pytest.mark.slow
@pytest.mark.compile_only
@pytest.mark.parametrize("num_layers", [4, 12])
def test_unrolled_layers_are_compiled_as_fast_as_predicted(num_layers: int) -> None:
    workload = registry.get("gpt-small", layers="scan", num_layers=num_layers)
    args = workload.abstract_args()
    found: dict[str, Any] = {}
    for loops in ("as written", "auto"):
        plan = rhino.plan(
            workload.step,
            *args,
            mesh={"data": 8},
            hardware="h100:8",
            donate_argnums=workload.donate_argnums,
            loops=loops,
        )
        with skipped_without_extra():
            verified = plan.verify(workload.step, *args, compile_for="h100:8")
        assert verified.ok, verified.table()
        compiled, predicted = verified.compiled, plan.predicted
        print(
            f"\nloops={loops!r}: {1e3 * predicted.step_time_s:.3g} ms, compiled"
            f" {1e3 * compiled.step_time_s:.3g}; {predicted.peak_bytes / 2**30:.3g}"
            f" GiB, compiled {compiled.peak_bytes / 2**30:.3g}"
        )
        assert compiled.step_time_s == pytest.approx(predicted.step_time_s, rel=0.3)
        assert compiled.peak_bytes == pytest.approx(predicted.peak_bytes, rel=0.15)
        found[loops] = compiled
    assert found["auto"].step_time_s < 0.7 * found["as written"].step_time_s
    assert found["auto"].peak_bytes < found["as written"].peak_bytes
