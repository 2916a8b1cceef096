"""Report of a suite of planned pipelines: the plans, and seconds of planning.

A step over its ideal is the predicted step over the seconds that the busiest stage
works in it: compute with exposed collectives, of all micro-batches, and the update. The
ideal has no waiting: no fill or drain of the pipeline, and no transfers between stages.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import rhino_jax as rhino
from rhino_jax.bench.methods import ALPA, SCHEDULES, ShardingMethod
from rhino_jax.bench.planning import workload_of
from rhino_jax.bench.rows.row_run import (
    ADDITIONS,
    Cells,
    Found,
    RowKind,
    yardstick_s,
)
from rhino_jax.bench.suite import BenchRow
from rhino_jax.bench.tables.figures import format_span
from rhino_jax.errors import InfeasiblePlanError, StageError
from rhino_jax.pipeline.of_plan import schedule_of
from rhino_jax.pipeline.simulator import simulate
from rhino_jax.plan.stages import STAGE_AXIS
from rhino_jax.units import format_bytes, format_seconds, format_share


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedPipeline:
    """One plan of a row.

    Attributes:
      method: name of the method.
      error: why there is no plan; then all else is 0 or empty.
      places: number of places of every stage along the stage axis; empty without
        stages.
      mesh: mesh of all devices: axis → size.
      micro_batches: number of micro-batches.
      schedule: name of the schedule; empty without stages.
      step_s, ideal_s: predicted step, and that of the busiest stage alone, in seconds.
      bubble: idle share of all devices' time.
      peak_bytes: peak memory of the fullest device.
      plan_s, cpu_s: planning time, tracing included: wall-clock seconds, and CPU
        seconds of the process.
      yardstick_s: seconds of the yardstick (see `yardstick`) just before.
    """

    method: str
    error: str = ""
    places: tuple[int, ...] = ()
    mesh: Mapping[str, int]
    micro_batches: int = 1
    schedule: str = ""
    step_s: float = 0.0
    ideal_s: float = 0.0
    bubble: float = 0.0
    peak_bytes: int = 0
    plan_s: float
    cpu_s: float
    yardstick_s: float


Plans = Sequence[PlannedPipeline]
"""A row's plans, one for every method."""


def plan_pipeline(row: BenchRow) -> PlannedPipeline:
    """Plan a row by its only method."""
    (method,) = row.methods
    workload, beside_s = workload_of(row), yardstick_s()
    started, cpu = time.monotonic(), time.process_time()
    error, planned = "", None
    try:
        planned = rhino.plan(
            workload.step,
            *workload.abstract_args(),
            hardware=row.target,
            per_microbatch=row.per_microbatch,
            memory_budget_bytes=row.memory or None,
            donate_argnums=workload.donate_argnums,
            **_asked(row, method),
        )
    except (InfeasiblePlanError, StageError) as refused:
        error = refused.what
    found = PlannedPipeline(
        method=method.name,
        error=error,
        mesh={},
        plan_s=time.monotonic() - started,
        cpu_s=time.process_time() - cpu,
        yardstick_s=beside_s,
    )
    if planned is None:
        return found
    step_s = planned.predicted.step_time_s
    found = replace(
        found,
        mesh=dict(planned.mesh_axes),
        micro_batches=planned.microbatches,
        step_s=step_s,
        ideal_s=step_s,
        peak_bytes=planned.predicted.peak_bytes,
    )
    if planned.pipeline is None:
        return found
    return replace(
        found,
        places=tuple(planned.places),
        schedule=planned.schedule,
        ideal_s=max(planned.pipeline.busy_s),
        bubble=simulate(schedule_of(planned.pipeline)).bubble,
    )


def _asked(row: BenchRow, method: ShardingMethod) -> dict[str, Any]:
    """Return the keywords of `rhino.plan` that a method sets or leaves open."""
    if method.plan == ALPA:
        assert row.alpa is not None, "suites are checked"
        return row.alpa.asked()
    return {
        "mesh": dict(row.mesh) or None,
        "stages": row.stages or "auto",
        "microbatches": row.microbatches or "auto",
        "schedule": method.plan if method.plan in SCHEDULES else "auto",
    }


def _said(found: PlannedPipeline) -> str:
    if found.error:
        return f"{found.method} none: {found.error}"
    stages = f"{max(1, len(found.places))} × m = {found.micro_batches}"
    return f"{found.method} {stages}, {format_seconds(found.step_s)}"


def _cells(row: BenchRow, plans: Plans) -> Cells:
    for one in plans:
        first_s, is_last = plans[0].step_s, one.method == row.methods[-1].name
        took = {
            "s": f"{one.plan_s:.3g}",
            "CPU s": f"{one.cpu_s:.3g}",
            "yardstick s": f"{one.yardstick_s:.3g}",
        }
        if one.error:
            yield {"asked": one.method, "stages": one.error, **took}
            continue
        mesh = (str(n) for a, n in one.mesh.items() if a != STAGE_AXIS)
        yield {
            "asked": one.method,
            "stages": _stages(one.places),
            "mesh of one": " × ".join(mesh),
            "m": str(one.micro_batches),
            "schedule": one.schedule or "none",
            "step": format_seconds(one.step_s),
            "÷ ideal": f"{one.step_s / one.ideal_s:.3f}",
            "bubble": format_share(one.bubble),
            "peak": format_bytes(one.peak_bytes),
            "÷ first": f"{one.step_s / first_s:.3f}" if first_s else "",
            "published": f"{row.published:.3f}" if is_last and row.published else "",
            **took,
        }


def _summary(suite: str, found: Found[Plans]) -> Iterator[str]:
    """Yield lines on planning time, on steps over their ideal, and over those of Alpa's
    published stages."""
    every = [p for _, plans in found for p in plans if not p.error]
    if not every:
        return
    took = [p.cpu_s for p in every]
    over = [p.step_s / p.ideal_s for p in every if p.places]
    said = f", step over ideal {min(over):.2f} to {max(over):.2f}" if over else ""
    yield (
        f"`{suite}`, {len(every)} plans: {format_seconds(min(took))} to"
        f" {format_seconds(max(took))} of one core{said}."
    )
    ratios: dict[str, list[float]] = {}
    for _, plans in found:
        alpa = next((p.step_s for p in plans if p.method == ALPA), 0.0)
        for plan in plans:
            if alpa and plan.step_s and plan.method != ALPA:
                ratios.setdefault(plan.method, []).append(plan.step_s / alpa)
    for method, over in ratios.items():
        yield (
            f"`{method}`, {len(over)} steps over those of Alpa's stages:"
            f" {format_span(over)}."
        )


def _stages(places: Sequence[int]) -> str:
    if not places:
        return "1"
    return str(len(places)) if len({*places}) == 1 else " + ".join(map(str, places))


PIPELINES: RowKind[Plans] = RowKind(
    name="pipelines",
    sample=PlannedPipeline,
    measure=plan_pipeline,
    read=list,
    line=lambda found: "; ".join(map(_said, found)),
    cells=_cells,
    notes="Predicted. The ideal is the time that the tasks of the busiest stage take,"
    " of all micro-batches and with the update: no filling, no draining, no transfer."
    " `÷ first` is the step over that of the row's first method; `published`, the same"
    " as others measured it. Seconds of planning, tracing included, in one process, and"
    f" of its CPU; the yardstick is what {ADDITIONS // 10**6} million additions in a"
    " Python loop took just before.",
    summary=_summary,
    is_by_method=True,
)
