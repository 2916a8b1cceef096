"""All points of a sweep: rows, the Pareto front, text and HTML."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

from rhino_jax.errors import RhinoError
from rhino_jax.explain.report.html import Displayed, sections_to_html
from rhino_jax.explain.report.line import format_mesh
from rhino_jax.explain.report.section import Section, Table
from rhino_jax.explain.report.views.scatter import Dot, PlotAxis, scatter
from rhino_jax.sweep.point import Point, SweepWork, format_price, format_stages
from rhino_jax.units import format_bytes, format_seconds


COLUMNS = tuple(f.name for f in fields(Point) if f.name != "make")

FRONT = "Pareto front of step time, cost, memory and devices"

WORK = (
    "groups: configurations that differ only in their budgets; planned: each planned in"
    " full; of the others, meshes modelled and searched; reused: meshes known from a"
    " larger budget; ruled out: meshes excluded by bounds"
)

MAX_ROWS = 20
"""Maximum number of points in a table that is not full."""


@dataclass(frozen=True, slots=True, repr=False)
class Sweep(Displayed):
    """Cost of every configuration; `print` it to read it.

    Attributes:
      program: name of the function.
      points: one for every configuration, in the order of the lists.
      work: work of the sweep.
    """

    program: str
    points: tuple[Point, ...]
    work: SweepWork

    @property
    def seconds(self) -> float:
        """Wall-clock seconds of the sweep."""
        return self.work.seconds

    def __len__(self) -> int:
        return len(self.points)

    def __iter__(self) -> Iterator[Point]:
        return iter(self.points)

    def __getitem__(self, position: int) -> Point:
        return self.points[position]

    @property
    def best(self) -> Point | None:
        """The fastest point that fits, per row of a varying batch; None without."""
        return best_of(self.points)

    def pareto(self) -> tuple[Point, ...]:
        """Return the Pareto front in step time, cost per step, peak memory and devices.

        The fastest comes first. If the batch varies, time and cost are per row of it.
        """
        fitting = sorted(
            (p for p in self.points if p.fits), key=lambda p: (p.worth, p.step_s)
        )
        front: list[Point] = []
        for point in fitting:
            # Points are sorted: no later one dominates an earlier one.
            if not any(
                all(x <= y for x, y in zip(kept.worth, point.worth, strict=True))
                for kept in front
            ):
                front.append(point)
        return tuple(front)

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return a dict for every point; the mesh as text."""
        return [
            {
                name: format_mesh(p.mesh) if name == "mesh" else getattr(p, name)
                for name in COLUMNS
            }
            for p in self.points
        ]

    def to_pandas(self) -> Any:
        """Return a `pandas.DataFrame`, a row for every point.

        Raises:
          RhinoError: pandas is not installed.
        """
        try:
            pandas = importlib.import_module("pandas")
        except ImportError:
            raise RhinoError(
                "`Sweep.to_pandas`: pandas is not installed.",
                where="import pandas",
                fix="pip install pandas, or use to_dicts().",
            ) from None
        return pandas.DataFrame(self.to_dicts(), columns=list(COLUMNS))

    def _sections(self, *, full: bool) -> tuple[Section, ...]:
        return _sections(self, full)

    def __repr__(self) -> str:
        fitting = sum(p.fits for p in self.points)
        return f"Sweep({self.program}: {fitting} of {len(self.points)} fit)"

    def _repr_html_(self) -> str:
        return sections_to_html(_sections(self, full=True))


def best_of(points: Sequence[Point]) -> Point | None:
    """Return the fastest point that fits; None if none does."""
    fitting = [p for p in points if p.fits]
    return min(fitting, key=lambda p: p.worth) if fitting else None


def _sections(sweep: Sweep, full: bool) -> tuple[Section, ...]:
    front = sweep.pareto()
    fitting = sorted((p for p in sweep.points if p.fits), key=lambda p: p.worth)
    others = [p for p in sweep.points if not p.fits]
    shown = [*fitting, *others] if full else fitting[:MAX_ROWS]
    left = len(sweep.points) - len(shown)
    lines = [f"*: {FRONT}"]
    if left:
        lines.append(
            f"{left} more, {len(others)} of which do not fit: table(full=True)"
        )
    title = (
        f"{sweep.program}: {len(sweep.points)} configurations, {len(fitting)} fit, in"
        f" {format_seconds(sweep.seconds)}"
    )
    return (
        Section(title, table=_table(front, front), drawing=_drawn(fitting, front)),
        Section("all", table=_table(shown, front), lines=tuple(lines)),
        Section("work", table=_of_work(sweep.work), lines=(WORK,)),
    )


def _of_work(work: SweepWork) -> Table:
    counts = work.counts
    cells = {
        "points": work.configurations,
        "groups": work.groups,
        "planned": work.planned,
        "modelled": counts.models,
        "searches": counts.searches,
        "reused": counts.reused,
        "ruled out": counts.ruled_out,
        "processes": work.processes,
    }
    row = [f"{n:,}" for n in cells.values()]
    row += [f"{work.cpu_s:.0f}", f"{work.seconds:.0f}"]
    header = (*cells, "CPU s", "s")
    return Table(header, (tuple(row),), ">" * len(row))


def _drawn(points: Sequence[Point], front: Sequence[Point]) -> str:
    """Draw cost and memory over time, as in `Point.worth`; no cost if none is known."""
    marks = {id(p) for p in front}
    per_row = " of a row of the batch" if any(p.batch for p in points) else ""
    time = PlotAxis(f"step time{per_row}", format_seconds)
    drawn = []
    for place, axis in (
        (1, PlotAxis(f"USD per 1M steps{per_row}", format_price)),
        (2, PlotAxis("peak memory", format_bytes)),
    ):
        dots = [
            Dot(
                p.worth[0],
                p.worth[place],
                p.hardware.partition(":")[0],
                repr(p),
                id(p) in marks,
            )
            for p in points
        ]
        drawn.append(scatter(dots, time, axis, marks=FRONT))
    return "".join(drawn)


def _table(points: Sequence[Point], front: Sequence[Point]) -> Table:
    marks = {id(p) for p in front}
    rows = tuple(_row(p, id(p) in marks) for p in points)
    header = ("", "hardware", "mesh", "budget", "batch", "stages", "micro-batches",
              "step", "peak", "USD per 1M steps")  # fmt: skip
    # Leave out columns whose option has its default in all rows.
    kept = [
        i
        for i, name in enumerate(header)
        if name not in UNASKED or any(row[i] != UNASKED[name] for row in rows)
    ]
    return Table(
        tuple(header[i] for i in kept),
        tuple(tuple(row[i] for i in kept) for row in rows),
        "".join("<<<>>>>>>>"[i] for i in kept),
        (2, 1),
    )


UNASKED = {"batch": "", "stages": "1", "micro-batches": "1"}
"""Columns of optional options, with the cell of their default."""


def _row(point: Point, is_best: bool) -> tuple[str, ...]:
    price = point.price_per_step
    what = "-" if price is None else format_price(price)
    if not math.isfinite(point.step_s):
        what = "-"
    return (
        "*" if is_best else "",
        point.hardware,
        format_mesh(point.mesh) if point.fits else point.why,
        format_bytes(point.memory_budget_bytes),
        str(point.batch or ""),
        format_stages(point.stages),
        str(point.microbatches),
        format_seconds(point.step_s) if point.fits else "does not fit",
        format_bytes(point.peak_bytes) if point.peak_bytes else "",
        what,
    )
