"""A suite's results in a few lines, for the README.

Changes of compiled steps since an earlier run of a suite.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

from rhino_jax.bench.records import FINAL, Result
from rhino_jax.bench.rows.clock import Clocked
from rhino_jax.bench.rows.plan_run import Timed
from rhino_jax.bench.rows.row_run import RowResult
from rhino_jax.bench.tables.figures import Figures, geometric_mean
from rhino_jax.units import format_bytes, format_seconds, format_share


Cell = tuple[str, str, str, str]
"""Workload, regime, target and method, which identify a cell across versions."""


def changes_text(
    results: Iterable[Result], earlier: Iterable[Result], file: str
) -> str:
    """Return lines on the changes since an earlier run.

    First a line per method with compiled step times over the earlier ones, where both
    fit; then cells that fit only now, or no longer, and failures.

    Args:
      results: results of this run.
      earlier: results of the earlier run.
      file: file of the earlier results.
    """
    now, before = ({_cell(r): r for r in rs} for rs in (results, earlier))
    ratios: dict[str, list[tuple[float, str]]] = {}
    lost, won, unknown = [], [], []
    for cell, new in now.items():
        old = before.get(cell)
        if old is None:
            continue
        new_s, old_s = _step_s(new), _step_s(old)
        name = f"{new.workload} on {new.target}"
        if new.status not in FINAL or old.status not in FINAL:
            unknown.append(f"{name}, {new.method}: {new.status}, was {old.status}")
            continue
        if new_s is not None and old_s is not None:
            ratios.setdefault(new.method, []).append((new_s / old_s, name))
        elif old_s is not None:
            lost.append(f"{name}, {new.method}")
        elif new_s is not None:
            won.append(f"{name}, {new.method}")
    lines = [f"Compiled step times over those of {file}, where both fit:"]
    for method, found in ratios.items():
        low, high = min(found), max(found)
        mean = geometric_mean([ratio for ratio, _ in found])
        lines.append(
            f"- `{method}`, {len(found)} rows: geometric mean {mean:.3f}, from"
            f" {low[0]:.3f} ({low[1]}) to {high[0]:.3f} ({high[1]})"
        )
    if not ratios:
        lines.append("- no cell is in both")
    lines += [f"- fits no longer: {x}" for x in lost]
    lines += [f"- fits now: {x}" for x in won]
    lines += [f"- not compared: {x}" for x in unknown]
    return "\n".join(lines)


def _cell(result: Result) -> Cell:
    return result.workload, result.regime, result.target, result.method


def _step_s(result: Result) -> float | None:
    if not result.fits or result.compiled is None:
        return None
    return result.compiled.step_time_s


WIDTH = 120


def compiled_summary(
    suite: str, results: Sequence[Result], figures: Figures
) -> tuple[str, ...]:
    """Return lines on compiled plans over recipes, and on predictions."""
    ratios: dict[str, list[float]] = {}
    for q in figures.quality:
        if q.ratio is not None:
            ratios.setdefault(q.method, []).append(q.ratio)
    targets = ", ".join(dict.fromkeys(r.target for r in results))
    num_rows = len({r.row for r in results})
    said = ", ".join(f"`{name}` {_span(found)}" for name, found in ratios.items())
    first = f"`{suite}`, rows: {num_rows}, on {targets}: compiled step over the best"
    first += f" recipe's: {said or 'no recipe fits'}."
    nowhere, only = figures.only_recipes_fit, figures.only_rhino_fits
    first += (
        f" Fits where no recipe does: {_rows(only)}; the reverse: {_rows(nowhere)}."
    )
    fidelity = figures.fidelity
    medians = ", ".join(
        f"{name} {format_share(errors.median)}"
        for name, errors in (
            ("step time", fidelity.step),
            ("bytes on the wire", fidelity.wire),
            ("peak memory", fidelity.peak),
        )
        if errors.median is not None
    )
    if not medians:
        return (first,)
    return (
        first,
        f"`{suite}`, predicted against compiled over {fidelity.programs} programs,"
        f" median error: {medians}.",
    )


def planned_summary(suite: str, results: Sequence[RowResult[Timed]]) -> tuple[str, ...]:
    """Return lines on seconds, gaps and memory of planning."""
    found = [r.found for r in results if r.found is not None]
    if not found:
        return ()
    methods = dict.fromkeys(name for timed in found for name in timed.plan_s)
    parts = []
    for name in methods:
        seconds = sorted(t.plan_s[name] for t in found if name in t.plan_s)
        gaps = [t.gap[name] for t in found if name in t.gap]
        parts.append(
            f"`{name}` {format_seconds(seconds[0])} to {format_seconds(seconds[-1])},"
            f" gap at most {format_share(max(gaps))}"
        )
    ops = max(t.num_ops for t in found)
    held = format_bytes(max(t.peak_bytes for t in found))
    return (
        f"`{suite}`, {len(found)} programs of up to {ops:,} ops, planned in:"
        f" {'; '.join(parts)}. At most {held} of memory.",
    )


def clocked_summary(
    suite: str, results: Sequence[RowResult[Clocked]]
) -> tuple[str, ...]:
    """Return lines on steps over recipes' steps, and a call's overhead."""
    found = [r.found for r in results if r.found is not None]
    if not found:
        return ()
    ratios: dict[str, list[float]] = {}
    for clocked in found:
        for name, ratio in clocked.ratio.items():
            ratios.setdefault(name, []).append(ratio)
    said = ", ".join(f"`{name}` {_span(values)}" for name, values in ratios.items())
    overheads = sorted(c.overhead_s for c in found)
    return (
        f"`{suite}`, {len(found)} models that really run, on emulated devices: step"
        f" over the fastest recipe's: {said}. A decorated call costs"
        f" {format_seconds(overheads[0])} to {format_seconds(overheads[-1])} more than"
        " one of `jax.jit`.",
    )


def to_list(lines: Sequence[str]) -> str:
    """Return a Markdown list, with no line longer than `WIDTH`."""
    return "\n".join(
        textwrap.fill(
            f"- {line}",
            WIDTH,
            subsequent_indent="  ",
            break_long_words=False,
            break_on_hyphens=False,
        )
        for line in lines
    )


def _span(ratios: Sequence[float]) -> str:
    mean = geometric_mean(ratios)
    return f"{min(ratios):.2f} to {max(ratios):.2f} (geometric mean {mean:.2f})"


def _rows(found: Sequence[str]) -> str:
    """Return the number of rows in names as `row: method`."""
    count = len({name.rpartition(":")[0] for name in found})
    return f"{count} {'row' if count == 1 else 'rows'}" if count else "none"
