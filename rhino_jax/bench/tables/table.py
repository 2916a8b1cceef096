"""Results as Markdown: a line per row, every cell, the figures; and in a few lines."""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Iterable, Mapping, Sequence

from rhino_jax.bench.methods import RHINO, parse_method
from rhino_jax.bench.records import FINAL, Measure, Result
from rhino_jax.bench.tables.figures import (
    Errors,
    Figures,
    best_recipe,
    by_name,
    by_row,
    format_span,
)
from rhino_jax.bench.versions import versions_line
from rhino_jax.ir.spec import axes_text
from rhino_jax.units import format_share


def to_markdown(
    suite: str, results: Sequence[Result], figures: Figures, command: str
) -> str:
    """Return the whole report.

    Args:
      suite: name of the suite.
      results: results of all its cells.
      figures: figures of these results.
      command: the command that repeats the run.
    """
    made_with = "; ".join(dict.fromkeys(versions_line(r.versions) for r in results))
    parts = [
        f"Suite `{suite}`: `{command}`. Made with {made_with}.",
        rows_table(results),
        _figures_list(figures),
        f"<details><summary>All {len(results)} cells</summary>",
        cells_table(results),
        "</details>",
    ]
    return "\n\n".join(parts) + "\n"


def rows_table(results: Sequence[Result]) -> str:
    """Return one line per row: the best recipe, rhino's plans, and their ratios."""
    own = sorted(
        {r.method for r in results if not r.is_recipe},
        key=lambda name: (RHINO.index(parse_method(name).plan), name),
    )
    lines = []
    for cells in by_row(results):
        recipe, found = best_recipe(cells), {r.method: r for r in cells}
        last = next((found[m] for m in reversed(own) if m in found), None)
        line = _head(cells[0]) | {
            "mesh": _mesh(last or cells[0]),
            "best recipe": "none fits" if recipe is None else recipe.method,
            "ms": "" if recipe is None else _step(recipe),
            **{f"{m} ms": _step(found[m]) if m in found else "" for m in own},
            "÷ recipe": _ratio(last, recipe),
            "sent GB": _pair(last, "wire_bytes", 1e9),
            "held GiB": _pair(last, "peak_bytes", 2**30),
            "plan s": "" if last is None else _seconds(last.plan_s),
        }
        lines.append(line)
    said = (
        "Step times, bytes on the wire and peak memory are per device, as compiled; in"
        f" brackets as predicted. The last four columns are of `{own[-1]}`."
        if own
        else "Step times are as compiled."
    )
    return table_of(lines, left=5) + "\n\n" + said


def cells_table(results: Sequence[Result]) -> str:
    """Return one line per cell, with predicted and compiled figures."""
    lines = [
        _head(r)
        | {
            "mesh": _mesh(r),
            "method": r.method,
            "step ms": _pair(r, "step_time_s", 1e-3),
            "compute ms": _pair(r, "compute_s", 1e-3),
            "sent GB": _pair(r, "wire_bytes", 1e9),
            "held GiB": _pair(r, "peak_bytes", 2**30),
            "rematerialised": "" if r.rematerialised is None else str(r.rematerialised),
            "plan s": _seconds(r.plan_s),
            "compile s": _seconds(r.compile_s),
            "fits": "yes" if r.fits else r.status,
        }
        for r in results
    ]
    return table_of(lines, left=5)


def _head(result: Result) -> dict[str, str]:
    return {
        "workload": result.workload,
        "batch": result.regime,
        "target": result.target,
    }


def _figures_list(figures: Figures) -> str:
    fidelity = figures.fidelity
    lines = [f"Predicted against compiled, {fidelity.programs} programs:"]
    for name, errors in (
        ("bytes on the wire", fidelity.wire),
        ("peak memory", fidelity.peak),
        ("step time", fidelity.step),
    ):
        lines.append(f"- error of {name}: {_errors(errors)}")
    parts = [f"{t} {format_share(x)}" for t, x in fidelity.unpredicted.items()]
    said = ", ".join(parts) or "no programs"
    lines.append(f"- largest part of a compiled peak that was not predicted: {said}")
    ranks = ", ".join(
        f"{target} {'too few programs' if rho is None else f'{rho:.3f}'}"
        for target, rho in fidelity.rank_correlation.items()
    )
    lines.append(f"- Spearman correlation of step time: {ranks or 'no programs'}")
    lines += ["", "rhino's compiled step time over the best fitting recipe's:"]
    little = figures.ratios("little")
    for method, ratios in figures.ratios().items():
        line = f"- `{method}`: worst {max(ratios):.3f}"
        if method in little:
            mean = statistics.geometric_mean(little[method])
            line += f"; geometric mean of little batch {mean:.3f}"
        lines.append(line)
    for text, rows in (
        ("fits where no recipe does", figures.only_rhino_fits),
        ("does not fit where a recipe does", figures.only_recipes_fit),
    ):
        lines.append(f"- {text}: {'; '.join(rows) or 'nowhere'}")
    lines.append(
        f"- values rematerialised in full: {figures.rematerialised} in rhino's plans,"
        f" {figures.recipes_rematerialised} in the recipes"
    )
    if figures.failed:
        lines.append(f"- cells that failed: {figures.failed}")
    return "\n".join(lines)


def _errors(errors: Errors) -> str:
    if errors.median is None or errors.high is None or errors.worst is None:
        return "no programs"
    return (
        f"median {format_share(errors.median)}, 95th percentile"
        f" {format_share(errors.high)}, worst {format_share(errors.worst)}"
        f" ({errors.worst_cell})"
    )


def _mesh(result: Result) -> str:
    return axes_text(result.mesh.items(), " × ") if result.mesh else "rhino's choice"


def _step(result: Result) -> str:
    if math.isinf(result.step_s):
        return result.status
    return _number(result.step_s * 1e3)


def _seconds(value_s: float | None) -> str:
    return "" if value_s is None else f"{value_s:.1f}"


def _ratio(result: Result | None, recipe: Result | None) -> str:
    if result is None or recipe is None or not result.fits:
        return ""
    return f"{result.step_s / recipe.step_s:.2f}"


def _pair(result: Result | None, quantity: str, unit: float) -> str:
    """Format a quantity as `12.3 (12.1)`: compiled, then predicted."""
    if result is None:
        return ""

    def of(side: Measure | None) -> str:
        value = None if side is None else getattr(side, quantity)
        return "?" if value is None else _number(value / unit)

    if result.predicted is None and result.compiled is None:
        return ""
    return f"{of(result.compiled)} ({of(result.predicted)})"


def _number(value: float) -> str:
    """Format a number with three significant digits."""
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{digits}f}" if digits < 6 else f"{value:.1e}"


def table_of(lines: Sequence[Mapping[str, str]], left: int) -> str:
    """Return a Markdown table of lines, each column → cell.

    Columns are in the order of the longest line; others may lack some in the middle.

    Args:
      lines: cells of each row, by column; text of absent ones is empty.
      left: number of left-aligned columns.
    """
    longest = sorted(lines, key=len, reverse=True)
    header = list(dict.fromkeys(name for line in longest for name in line))
    cells = [[line.get(name, "") for name in header] for line in lines]
    return markdown_table(header, cells, left)


def markdown_table(
    header: Sequence[str], lines: Sequence[Sequence[str]], left: int
) -> str:
    """Return a Markdown table, right-aligned from the `left`th column on.

    Args:
      header: names of the columns.
      lines: cells of each row.
      left: number of left-aligned columns.
    """
    marks = ["---" if i < left else "--:" for i in range(len(header))]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |"
        for line in (header, marks, *lines)
    )


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
    before = {(r.workload, r.regime, r.target, r.method): r for r in earlier}
    ratios: list[tuple[str, tuple[float, str]]] = []
    lost, won, unknown = [], [], []
    for new in results:
        old = before.get((new.workload, new.regime, new.target, new.method))
        if old is None:
            continue
        name = f"{new.workload} on {new.target}"
        if new.status not in FINAL or old.status not in FINAL:
            unknown.append(f"{name}, {new.method}: {new.status}, was {old.status}")
        elif new.fits and old.fits:
            ratios.append((new.method, (new.step_s / old.step_s, name)))
        elif old.fits:
            lost.append(f"{name}, {new.method}")
        elif new.fits:
            won.append(f"{name}, {new.method}")
    lines = [f"Compiled step times over those of {file}, where both fit:"]
    for method, found in by_name(ratios).items():
        low, high = min(found), max(found)
        mean = statistics.geometric_mean([ratio for ratio, _ in found])
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


WIDTH = 120


def compiled_summary(
    suite: str, results: Sequence[Result], figures: Figures
) -> tuple[str, ...]:
    """Return lines on compiled plans over recipes, and on predictions."""
    ratios = figures.ratios()
    targets = ", ".join(dict.fromkeys(r.target for r in results))
    num_rows = len({r.row for r in results})
    said = ", ".join(f"`{name}` {format_span(found)}" for name, found in ratios.items())
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


def _rows(found: Sequence[str]) -> str:
    """Return the number of rows in names as `row: method`."""
    count = len({name.rpartition(":")[0] for name in found})
    return f"{count} {'row' if count == 1 else 'rows'}" if count else "none"
