"""Report of a suite of planned pipelines: the plans, and seconds of planning.

A step over its ideal is the predicted step over the seconds that the busiest stage
works in it: compute with exposed collectives, of all micro-batches, and the update. The
ideal has no waiting: no fill or drain of the pipeline, and no transfers between stages.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import rhino_jax as rhino
from rhino_jax.bench.methods import ALPA, SCHEDULES, ShardingMethod
from rhino_jax.bench.rows.row_run import Found, RowKind, TableLines
from rhino_jax.bench.rows.timed_plan import ADDITIONS, Plans, TimedPlan, yardstick_s
from rhino_jax.bench.suite import BenchRow
from rhino_jax.bench.tables.figures import by_name, format_seconds_span, format_span
from rhino_jax.errors import InfeasiblePlanError, StageError
from rhino_jax.plan.stages import STAGE_AXIS
from rhino_jax.units import format_bytes, format_seconds, format_share


def plan_pipeline(row: BenchRow) -> TimedPlan:
    """Plan a row by its only method; tracing is part of the planning time."""
    (method,) = row.methods
    workload, beside_s = row.make(), yardstick_s()
    started, cpu = time.monotonic(), time.process_time()
    planned, error = None, ""
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
    measured: dict[str, Any] = {
        "plan_s": time.monotonic() - started,
        "cpu_s": {"all": time.process_time() - cpu},
        "yardstick_s": beside_s,
    }
    if planned is None:
        return TimedPlan(method=method.name, error=error, **measured)
    return TimedPlan.of(method.name, planned, **measured)


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


def _said(found: TimedPlan) -> str:
    if found.error:
        return f"{found.method} none: {found.error}"
    stages = f"{max(1, len(found.places))} × m = {found.micro_batches}"
    return f"{found.method} {stages}, {format_seconds(found.step_s)}"


def _table_lines(row: BenchRow, plans: Plans) -> TableLines:
    for one in plans:
        first_s, is_last = plans[0].step_s, one.method == row.methods[-1].name
        took = {
            "s": f"{one.plan_s:.3g}",
            "CPU s": f"{one.total_s:.3g}",
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
    took = [p.total_s for p in every]
    over = [p.step_s / p.ideal_s for p in every if p.places]
    said = f", step over ideal {min(over):.2f} to {max(over):.2f}" if over else ""
    yield (
        f"`{suite}`, {len(every)} plans: {format_seconds_span(took)} of one core{said}."
    )
    ratios = by_name(
        (plan.method, plan.step_s / alpa.step_s)
        for _, plans in found
        for alpa in plans
        for plan in plans
        if alpa.method == ALPA != plan.method and alpa.step_s and plan.step_s
    )
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
    sample=TimedPlan,
    measure=plan_pipeline,
    read=list,
    describe=lambda found: "; ".join(map(_said, found)),
    table=_table_lines,
    notes="Predicted. The ideal is the time that the tasks of the busiest stage take,"
    " of all micro-batches and with the update: no filling, no draining, no transfer."
    " `÷ first` is the step over that of the row's first method; `published`, the same"
    " as others measured it. Seconds of planning, tracing included, in one process, and"
    f" of its CPU; the yardstick is what {ADDITIONS // 10**6} million additions in a"
    " Python loop took just before.",
    summary=_summary,
    is_by_method=True,
)
