"""Results by hand, for tests of what is made of them."""

from __future__ import annotations

from typing import Any

from rhino_jax.bench.records import Measure, Result


VERSIONS = {"rhino_jax": "0.1.0", "jax": "0.10.2"}


def measure(step_ms: float, wire_mb: float = 1.0, peak_mib: float = 1.0) -> Measure:
    return Measure(
        step_time_s=step_ms / 1e3,
        compute_s=step_ms / 2e3,
        communication_s=step_ms / 2e3,
        peak_bytes=round(peak_mib * 2**20),
        wire_bytes=round(wire_mb * 1e6),
    )


def result(
    method: str,
    step_ms: float | None,
    *,
    predicted_ms: float | None = None,
    row: str = "a",
    status: str = "ok",
    **changes: Any,
) -> Result:
    """A cell that came out at `step_ms`; None: nothing was compiled."""
    made = None if step_ms is None else measure(step_ms)
    said = measure(step_ms or 1.0) if predicted_ms is None else measure(predicted_ms)
    values: dict[str, Any] = {
        "key": f"{row}-{method}",
        "row": row,
        "workload": f"model-{row}",
        "regime": "plenty",
        "target": "v5e:4x4",
        "mesh": {"data": 4, "model": 4},
        "method": method,
        "status": status,
        "predicted": said,
        "compiled": made,
        "rematerialised": 0,
        "plan_s": 1.5,
        "compile_s": 2.5,
        "program": f"{row}-{method}",
        "versions": VERSIONS,
    }
    return Result(**(values | changes))
