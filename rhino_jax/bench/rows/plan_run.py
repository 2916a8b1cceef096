"""Report of a suite that only plans: seconds, gaps, memory of planning."""

from __future__ import annotations

import resource
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace

from rhino_jax.bench.checks import BenchError
from rhino_jax.bench.planning import Planner
from rhino_jax.bench.rows.row_run import Found, RowKind, TableLines
from rhino_jax.bench.rows.timed_plan import ADDITIONS, Plans, TimedPlan, yardstick_s
from rhino_jax.bench.suite import BenchRow
from rhino_jax.bench.tables.figures import by_name, format_seconds_span
from rhino_jax.units import format_bytes, format_seconds, format_share


SAMPLES = 3
"""Number of processes that plan each row, each without caches; medians are used."""


def time_row(row: BenchRow) -> TimedPlan:
    """Plan a row by its only method.

    Raises:
      BenchError: the method has no plan.
    """
    planner, beside_s = Planner.of(row), yardstick_s()
    (method,) = row.methods
    result, plan = planner.plan(method)
    if plan is None:
        why, _, _ = result.error.partition("\n")
        raise BenchError(
            f"`bench`: {result.method} gives no plan to take the time of.",
            where=row.title,
            numbers=why,
            fix="leave the method out, or change the row's mesh, target or overrides.",
        )
    # `ru_maxrss` is in kilobytes on Linux, in bytes on macOS.
    unit = 1 if sys.platform == "darwin" else 1024
    found = TimedPlan.of(
        result.method,
        plan,
        num_ops=len(planner.traced.program.ops),
        plan_s=result.plan_s,
        held_bytes=unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        yardstick_s=beside_s,
    )
    return replace(found, step_s=plan.search.objective_s)


def _read(samples: Plans) -> list[TimedPlan]:
    """Return the medians of seconds by method, and the most memory of all."""
    by_method = by_name((sample.method, sample) for sample in samples)
    held_bytes = max(s.held_bytes for s in samples)
    beside_s = statistics.median(s.yardstick_s for s in samples)
    return [
        replace(
            own[-1],
            plan_s=statistics.median(s.plan_s for s in own),
            held_bytes=held_bytes,
            yardstick_s=beside_s,
        )
        for own in by_method.values()
    ]


def _table_lines(row: BenchRow, plans: Plans) -> TableLines:
    last = plans[-1]
    whole, left = last.num_nodes
    yield {
        "mesh": last.shape if row.mesh else f"{last.shape} (chosen)",
        "ops": f"{last.num_ops:,}",
        "nodes": f"{whole:,}",
        "left": f"{left:,}",
        **{f"{p.method} s": f"{p.plan_s:.3g}" for p in plans},
        **{f"{p.method} gap": f"{p.gap:.1%}" for p in plans},
        **{
            f"{p.method} ÷ {last.method}": f"{p.step_s / last.step_s:.3f}"
            for p in plans[:-1]
            if last.step_s
        },
        "held": format_bytes(last.held_bytes),
        "yardstick s": f"{last.yardstick_s:.2f}",
    }


def _summary(suite: str, found: Found[Plans]) -> Sequence[str]:
    """Return a line on seconds, gaps and memory of planning."""
    every = [plan for _, plans in found for plan in plans]
    parts = [
        f"`{name}` {format_seconds_span([plan.plan_s for plan in own])}, gap at most"
        f" {format_share(max(plan.gap for plan in own))}"
        for name, own in by_name((plan.method, plan) for plan in every).items()
    ]
    ops = max(plan.num_ops for plan in every)
    held = format_bytes(max(plan.held_bytes for plan in every))
    return (
        f"`{suite}`, {len(found)} programs of up to {ops:,} ops, planned in:"
        f" {'; '.join(parts)}. At most {held} of memory.",
    )


PLAN: RowKind[Plans] = RowKind(
    name="plan",
    sample=TimedPlan,
    measure=time_row,
    read=_read,
    describe=lambda plans: ", ".join(
        f"{p.method} {format_seconds(p.plan_s)}" for p in plans
    ),
    table=_table_lines,
    notes=f"Seconds of planning, tracing excluded: medians of {SAMPLES} processes. The"
    " gap is how far the predicted step may be above the best of plans that treat"
    " repeated layers alike, proved by a lower bound. `nodes` choose in the whole"
    " program, `left` in the folded and reduced problem. The ratio is of predicted"
    " steps; `held` is the most memory of a process, with JAX and the trace. The"
    f" yardstick is what {ADDITIONS // 10**6} million additions in a Python loop took"
    " beside it, on this machine.",
    summary=_summary,
    samples=SAMPLES,
    is_by_method=True,
)
