"""Predicted steps of layouts that others measured, with their order and ratios."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import combinations

from rhino_jax.bench.planning import Planner
from rhino_jax.bench.rows.row_run import Found, RowKind, TableLines
from rhino_jax.bench.rows.timed_plan import Plans, TimedPlan
from rhino_jax.bench.suite import BenchRow
from rhino_jax.bench.tables.figures import format_span
from rhino_jax.passes.apply import apply_passes
from rhino_jax.passes.microbatch.passed import cut_in
from rhino_jax.units import format_bytes, format_seconds


def predict_row(row: BenchRow) -> list[TimedPlan]:
    """Plan a row by each of its methods, in its number of micro-batches; a method
    without a plan is left out."""
    planner = Planner.of(row)
    if row.microbatches > 1:
        traced = apply_passes(planner.traced, [cut_in(row.microbatches)])
        planner = replace(planner, traced=traced)
    found = map(planner.plan, row.methods)
    return [TimedPlan.of(r.method, plan) for r, plan in found if plan is not None]


def _steps(plans: Plans) -> dict[str, float]:
    """Return method → predicted step in seconds."""
    return {plan.method: plan.step_s for plan in plans}


def _published(row: BenchRow) -> dict[str, float]:
    """Return the published step of each method that has one."""
    names = (method.name for method in row.methods)
    return dict(zip(names, row.published_s, strict=False))


def _table_lines(row: BenchRow, plans: Plans) -> TableLines:
    published, steps = _published(row), _steps(plans)
    first = row.methods[0].name
    for plan in plans:
        name = plan.method
        yield {
            "layout": name,
            "predicted ms": f"{1e3 * plan.step_s:,.1f}",
            "published ms": f"{1e3 * published[name]:,.1f}"
            if name in published
            else "",
            "predicted ÷ first": _ratio(steps, name, first),
            "published ÷ first": _ratio(published, name, first),
            "peak": format_bytes(plan.peak_bytes),
        }


def _ratio(steps: Mapping[str, float], name: str, first: str) -> str:
    both = name in steps and first in steps
    return f"{steps[name] / steps[first]:.2f}" if both else ""


def _summary(suite: str, found: Found[Plans]) -> Iterator[str]:
    """Yield a line on pairs of layouts: their order, and errors of their ratios."""
    pairs = [
        (steps[a] / steps[b], published[a] / published[b])
        for row, plans in found
        for steps, published in [(_steps(plans), _published(row))]
        for a, b in combinations([n for n in published if n in steps], 2)
    ]
    if pairs:
        same = sum((mine > 1) == (theirs > 1) for mine, theirs in pairs)
        ratios = format_span([mine / theirs for mine, theirs in pairs])
        yield (
            f"`{suite}`: {same} of {len(pairs)} pairs of layouts are in the published"
            f" order; predicted over published ratio: {ratios}."
        )


LAYOUTS: RowKind[Plans] = RowKind(
    name="layouts",
    sample=tuple[TimedPlan, ...],
    measure=predict_row,
    describe=lambda plans: ", ".join(
        f"{p.method} {format_seconds(p.step_s)}" for p in plans
    ),
    table=_table_lines,
    notes="Predicted steps, and those that others measured; both also over the first"
    " layout's. Sizes that a source leaves open are assumed: see the suite's file.",
    summary=_summary,
)
