"""Steps on the devices that are here: predicted, priced by the compiled HLO, measured.

Unlike `clock`, which compares plans on emulated devices, a row holds one plan against
the hardware that it is for: run it on a machine with the row's target.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from rhino_jax.bench.checks import BenchError
from rhino_jax.bench.planning import Planner
from rhino_jax.bench.rows.row_run import Found, RowKind, TableLines
from rhino_jax.bench.suite import BenchRow
from rhino_jax.bench.tables.figures import format_ms, format_span
from rhino_jax.bench.timing import fed_back, mean_s
from rhino_jax.hardware.files import load_target
from rhino_jax.models.workload import Workload
from rhino_jax.runtime.meshes import make_mesh
from rhino_jax.runtime.sharded import jit_with_plan
from rhino_jax.units import format_bytes, format_seconds
from rhino_jax.verify.places import place_of
from rhino_jax.verify.refine import compile_plan


SAMPLES = 7
"""Number of samples; the median is used."""

SAMPLE_S = 0.15
"""Approximate seconds of a sample: several steps, of which only the last is awaited,
as in training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """A step on real devices.

    Attributes:
      predicted_s, predicted_bytes: the plan's prediction, per device.
      priced_s, compiled_bytes: time of the compiled program by its HLO, and its peak.
      measured_s: median seconds of a step.
    """

    predicted_s: float
    predicted_bytes: float
    priced_s: float
    compiled_bytes: float
    measured_s: float


def device_row(row: BenchRow) -> MeasuredStep:
    """Plan a row by its first method, compile and run it on the devices present.

    Raises:
      BenchError: they are not those of the row's target, or there is no plan.
    """
    present = jax.devices()
    target, kind = load_target(row.target), present[0].device_kind
    if kind not in target.device.kinds or len(present) < (target.num_devices or 1):
        raise BenchError(
            f"`bench`: these devices are not those of {row.target!r}.",
            where=f"{row.model}, {row.target}",
            numbers=f"{len(present)} devices of kind {kind!r}",
            fix=f"run it on {' or '.join(map(repr, target.device.kinds))}, or write a"
            " suite for these devices.",
        )
    planner, workload = Planner.of(row), row.make()
    result, plan = planner.plan(row.methods[0])
    if plan is None:
        raise BenchError(
            f"`bench`: no plan by {result.method!r} to measure.",
            where=f"{row.model}, {row.target}",
            numbers=result.error,
            fix="change the row's mesh or memory.",
        )
    place = place_of(plan, make_mesh(plan.mesh_axes, "`bench`"), "`bench`")
    compiled = compile_plan(planner.traced, plan, place, {}).reading.compiled
    run = jit_with_plan(workload.step, plan, donate_argnums=workload.donate_argnums)
    return MeasuredStep(
        predicted_s=plan.predicted.step_time_s,
        predicted_bytes=plan.predicted.peak_bytes,
        priced_s=compiled.step_time_s,
        compiled_bytes=compiled.peak_bytes,
        measured_s=measured_s(run, workload),
    )


def measured_s(run: Callable[..., Any], workload: Workload) -> float:
    """Return the median seconds of a step, its state fed back."""
    step = fed_back(run, workload, workload.make_args(jax.random.key(0)))
    mean_s(step, 2)
    count = max(2, math.ceil(SAMPLE_S / mean_s(step)))
    return statistics.median(mean_s(step, count) for _ in range(SAMPLES))


def _table_lines(row: BenchRow, found: MeasuredStep) -> TableLines:
    yield {
        "predicted ms": format_ms(found.predicted_s),
        "by its HLO": format_ms(found.priced_s),
        "measured": format_ms(found.measured_s),
        "predicted ÷ measured": f"{found.predicted_s / found.measured_s:.2f}",
        "HLO ÷ measured": f"{found.priced_s / found.measured_s:.2f}",
        "GiB predicted": f"{found.predicted_bytes / 2**30:.3g}",
        "compiled": f"{found.compiled_bytes / 2**30:.3g}",
    }


def _summary(suite: str, found: Found[MeasuredStep]) -> tuple[str, ...]:
    """Return a line on predictions and prices over what was measured."""
    predicted = format_span([f.predicted_s / f.measured_s for _, f in found])
    priced = format_span([f.priced_s / f.measured_s for _, f in found])
    held = format_span([f.predicted_bytes / f.compiled_bytes for _, f in found])
    return (
        f"`{suite}`, {len(found)} steps on real devices: predicted over measured time"
        f" {predicted}; priced by the compiled HLO {priced}; predicted over compiled"
        f" peak {held}.",
    )


DEVICE: RowKind[MeasuredStep] = RowKind(
    name="device",
    sample=MeasuredStep,
    measure=device_row,
    describe=lambda found: (
        f"{format_seconds(found.measured_s)} measured,"
        f" {format_seconds(found.predicted_s)} predicted,"
        f" {format_bytes(found.compiled_bytes)}"
    ),
    table=_table_lines,
    notes="Steps with their state fed back, of which only the last of a sample is"
    " awaited: medians.",
    summary=_summary,
)
