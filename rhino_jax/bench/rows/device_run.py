"""Steps on the devices that are here: predicted, priced by the compiled HLO, measured.

Unlike `clock`, which compares plans on emulated devices, a row holds one plan against
the hardware that it is for: run it on a machine with the row's target.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from rhino_jax.bench.checks import BenchError
from rhino_jax.bench.planning import Planner, workload_of
from rhino_jax.bench.rows.row_run import Cells, Found, RowKind, the_only
from rhino_jax.bench.suite import BenchRow
from rhino_jax.bench.tables.figures import format_ms, format_span
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
    planner, workload = Planner.of(row), workload_of(row)
    planned = next(iter(planner.plans(row.methods[:1])))
    if planned.plan is None:
        raise BenchError(
            f"`bench`: no plan by {planned.method.name!r} to measure.",
            where=f"{row.model}, {row.target}",
            numbers=planned.error,
            fix="change the row's mesh or memory.",
        )
    mesh = make_mesh(planned.plan.mesh_axes, "`bench`")
    place = place_of(planned.plan, mesh, "`bench`")
    made = compile_plan(planner.traced, planned.plan, place, {})
    run = jit_with_plan(
        workload.step, planned.plan, donate_argnums=workload.donate_argnums
    )
    compiled = made.reading.compiled
    return MeasuredStep(
        predicted_s=planned.plan.predicted.step_time_s,
        predicted_bytes=planned.plan.predicted.peak_bytes,
        priced_s=compiled.step_time_s,
        compiled_bytes=compiled.peak_bytes,
        measured_s=measured_s(run, workload),
    )


def measured_s(run: Callable[..., Any], workload: Workload) -> float:
    """Return the median seconds of a step, its state fed back."""
    args = list(workload.make_args(jax.random.key(0)))

    def steps(count: int) -> float:
        started = time.perf_counter()
        for _ in range(count):
            result = run(*args)
            for i in workload.donate_argnums:
                args[i] = result[i]
        jax.block_until_ready(result)
        return (time.perf_counter() - started) / count

    steps(2)
    count = max(2, math.ceil(SAMPLE_S / steps(1)))
    return statistics.median(steps(count) for _ in range(SAMPLES))


def _cells(row: BenchRow, found: MeasuredStep) -> Cells:
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
    read=the_only,
    line=lambda found: (
        f"{format_seconds(found.measured_s)} measured,"
        f" {format_seconds(found.predicted_s)} predicted,"
        f" {format_bytes(found.compiled_bytes)}"
    ),
    cells=_cells,
    notes="Steps with their state fed back, of which only the last of a sample is"
    " awaited: medians.",
    summary=_summary,
)
