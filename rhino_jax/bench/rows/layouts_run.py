"""Predicted steps of layouts that others measured, with their order and ratios."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations

from rhino_jax.bench.planning import Planner
from rhino_jax.bench.rows.row_run import Cells, Found, RowKind, the_only
from rhino_jax.bench.suite import BenchRow
from rhino_jax.bench.tables.figures import format_span
from rhino_jax.passes.apply import apply_passes
from rhino_jax.passes.microbatch.passed import cut_in
from rhino_jax.plan.records import Predicted
from rhino_jax.units import format_bytes, format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Layouts:
    """Predictions for one row.

    Attributes:
      predicted: method → prediction; without methods that have no plan.
    """

    predicted: Mapping[str, Predicted]

    @property
    def step_s(self) -> dict[str, float]:
        """Method → predicted step in seconds."""
        return {name: p.step_time_s for name, p in self.predicted.items()}


def predict_row(row: BenchRow) -> Layouts:
    """Plan a row by each of its methods, in its number of micro-batches."""
    planner = Planner.of(row)
    if row.microbatches > 1:
        traced = apply_passes(planner.traced, [cut_in(row.microbatches)])
        planner = replace(planner, traced=traced)
    plans = {p.method.name: p.plan for p in planner.plans(row.methods)}
    return Layouts(predicted={k: p.predicted for k, p in plans.items() if p})


def _published(row: BenchRow) -> dict[str, float]:
    """Return the published step of each method that has one."""
    names = (method.name for method in row.methods)
    return dict(zip(names, row.published_s, strict=False))


def _cells(row: BenchRow, found: Layouts) -> Cells:
    published, steps = _published(row), found.step_s
    first = row.methods[0].name
    for name, predicted in found.predicted.items():
        yield {
            "layout": name,
            "predicted ms": f"{1e3 * steps[name]:,.1f}",
            "published ms": f"{1e3 * published[name]:,.1f}"
            if name in published
            else "",
            "predicted ÷ first": _ratio(steps, name, first),
            "published ÷ first": _ratio(published, name, first),
            "peak": format_bytes(predicted.peak_bytes),
        }


def _ratio(steps: Mapping[str, float], name: str, first: str) -> str:
    both = name in steps and first in steps
    return f"{steps[name] / steps[first]:.2f}" if both else ""


def _summary(suite: str, found: Found[Layouts]) -> Iterator[str]:
    """Yield a line on pairs of layouts: their order, and errors of their ratios."""
    pairs = [
        (steps[a] / steps[b], published[a] / published[b])
        for row, layouts in found
        for steps, published in [(layouts.step_s, _published(row))]
        for a, b in combinations([n for n in published if n in steps], 2)
    ]
    if pairs:
        same = sum((mine > 1) == (theirs > 1) for mine, theirs in pairs)
        ratios = format_span([mine / theirs for mine, theirs in pairs])
        yield (
            f"`{suite}`: {same} of {len(pairs)} pairs of layouts are in the published"
            f" order; predicted over published ratio: {ratios}."
        )


LAYOUTS: RowKind[Layouts] = RowKind(
    name="layouts",
    sample=Layouts,
    measure=predict_row,
    read=the_only,
    line=lambda found: ", ".join(
        f"{name} {format_seconds(s)}" for name, s in found.step_s.items()
    ),
    cells=_cells,
    notes="Predicted steps, and those that others measured; both also over the first"
    " layout's. Sizes that a source leaves open are assumed: see the suite's file.",
    summary=_summary,
)
