"""The runner of suites that take the time, and what it reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rhino_jax.bench.clock import Clocked
from rhino_jax.bench.figures import geometric_mean
from rhino_jax.bench.process import run_job
from rhino_jax.bench.progress import Clock, Report, title_of
from rhino_jax.bench.records import row_key
from rhino_jax.bench.store import Store, read_json, write_json
from rhino_jax.bench.suite import Row, Suite
from rhino_jax.bench.table import markdown_table
from rhino_jax.bench.versions import versions, versions_line
from rhino_jax.units import format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockResult:
    """One row: its times, or why there are none.

    Attributes:
      row: what was run.
      clocked: the times, or None.
      error: why there are none.
    """

    row: Row
    clocked: Clocked | None
    error: str = ""

    def to_dict(self) -> dict[str, Any]:
        clocked = None if self.clocked is None else self.clocked.to_dict()
        workload = self.row.workload
        return {"workload": workload, "clocked": clocked, "error": self.error}


def run_clock(suite: Suite, store: Store, report: Report) -> tuple[ClockResult, ...]:
    """Clock every row that was not clocked before, one process at a time."""
    current = versions()
    folder = store.folder / "clock"
    folder.mkdir(exist_ok=True)
    files = {row: folder / f"{row_key(row)}.json" for row in suite.rows}
    found: dict[Row, ClockResult] = {}
    for row, file in files.items():
        known = read_json(file)
        asked = [m.name for m in row.methods]
        if known is not None and (known["versions"], known["methods"]) == (
            current,
            asked,
        ):
            clocked = Clocked.from_dict(known["clocked"])
            found[row] = ClockResult(row=row, clocked=clocked)
    clock = Clock(total=len(files), done=len(found))
    for row, file in files.items():
        if row in found:
            continue
        result = found[row] = _clock_one(row, store, suite.timeout_s)
        if result.clocked is not None:
            entry = {
                "versions": current,
                "methods": [m.name for m in row.methods],
                "clocked": result.clocked.to_dict(),
            }
            write_json(file, entry)
        report(f"{clock.tick()} {title_of(row)}: {_line(result)}")
    return tuple(found[row] for row in suite.rows)


def _clock_one(row: Row, store: Store, timeout_s: float) -> ClockResult:
    file = store.folder / "clock" / f"{row_key(row)}.result.json"
    file.unlink(missing_ok=True)
    job = {"task": "clock", "row": row.to_table(), "result": str(file)}
    outcome = run_job(job, store.log(f"{row_key(row)}-clock"), timeout_s)
    values = read_json(file) if outcome.status == "ok" else None
    file.unlink(missing_ok=True)
    if values is None:
        error = f"{outcome.status}. {outcome.error}"
        return ClockResult(row=row, clocked=None, error=error)
    return ClockResult(row=row, clocked=Clocked.from_dict(values))


def _line(result: ClockResult) -> str:
    if result.clocked is None:
        return result.error.splitlines()[0]
    times = result.clocked.step_s.items()
    return ", ".join(f"{name} {format_seconds(s)}" for name, s in times)


def clock_report(suite: Suite, results: Sequence[ClockResult], command: str) -> str:
    """The times as Markdown: a line per row, the worst and the mean ratio.

    Args:
      suite: what was run.
      results: of all its rows.
      command: that made them, to be repeated.
    """
    own = [
        name
        for name in dict.fromkeys(m.name for row in suite.rows for m in row.methods)
        if any(r.clocked and name in r.clocked.ratio for r in results)
    ]
    header = ["workload", "target", "fastest recipe", "ms"]
    header += [f"{name} ms" for name in own] + [f"{name} ÷ recipe" for name in own]
    header += ["arrays", "overhead of a call µs"]
    lines = []
    for r in results:
        found = r.clocked
        if found is None:
            failed = [r.row.workload, r.row.target, r.error.splitlines()[0]]
            lines.append(failed + [""] * (len(header) - len(failed)))
            continue
        line = [found.workload, found.target, found.recipe]
        line.append(_ms(found.step_s.get(found.recipe)))
        line += [_ms(found.step_s.get(name)) for name in own]
        line += [f"{found.ratio[n]:.2f}" if n in found.ratio else "" for n in own]
        line += [str(found.num_arrays), f"{1e6 * found.overhead_s:.0f}"]
        lines.append(line)
    parts = [
        f"Suite `{suite.name}`: `{command}`. Made with {versions_line(versions())}.",
        markdown_table(header, lines, left=3),
        "Seconds of all devices together on this host's cores: medians of interleaved"
        " samples; ratios are medians of ratios within a sample. The overhead is of a"
        " decorated call over one of `jax.jit`, with the workload's arguments.",
    ]
    for name in own:
        clocked = [r.clocked for r in results if r.clocked is not None]
        ratios = [c.ratio[name] for c in clocked if name in c.ratio]
        parts.append(
            f"- `{name}`: worst ratio {max(ratios):.2f}, geometric mean"
            f" {geometric_mean(ratios):.2f}"
        )
    return "\n\n".join(parts) + "\n"


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:.3g}"
