"""Report of a suite that times steps."""

from __future__ import annotations

from collections.abc import Sequence

from rhino_jax.bench.rows.clock import Clocked
from rhino_jax.bench.rows.row_run import RowResult, RowTask, table_of_rows
from rhino_jax.bench.suite import BenchRow, Suite
from rhino_jax.bench.tables.figures import geometric_mean
from rhino_jax.units import format_seconds


def clock_task() -> RowTask[Clocked]:
    """Return the task that runs every row once, its methods interleaved."""
    return RowTask(
        name="clock",
        samples=1,
        is_by_method=False,
        read=lambda samples: Clocked.from_dict(samples[0]),
        line=_line,
    )


def _line(found: Clocked) -> str:
    times = found.step_s.items()
    return ", ".join(f"{name} {format_seconds(s)}" for name, s in times)


def clock_report(
    suite: Suite, results: Sequence[RowResult[Clocked]], command: str
) -> str:
    """Return the times as Markdown: a line per row, the worst and the mean ratio.

    Args:
      suite: the suite.
      results: results of all its rows.
      command: the command that repeats the run.
    """
    own = [
        name
        for name in dict.fromkeys(m.name for row in suite.rows for m in row.methods)
        if any(r.found and name in r.found.ratio for r in results)
    ]
    header = ["workload", "target", "fastest recipe", "ms"]
    header += [f"{name} ms" for name in own] + [f"{name} ÷ recipe" for name in own]
    header += ["arrays", "overhead of a call µs"]

    def cells(row: BenchRow, found: Clocked) -> list[str]:
        line = [row.workload, row.target, found.recipe]
        line.append(_ms(found.step_s.get(found.recipe)))
        line += [_ms(found.step_s.get(name)) for name in own]
        line += [f"{found.ratio[n]:.2f}" if n in found.ratio else "" for n in own]
        return [*line, str(found.num_arrays), f"{1e6 * found.overhead_s:.0f}"]

    parts = [
        *table_of_rows(suite, results, command, header, cells),
        "Seconds of all devices together on this host's cores: medians of interleaved"
        " samples; ratios are medians of ratios within a sample. The overhead is of a"
        " decorated call over one of `jax.jit`, with the workload's arguments.",
    ]
    for name in own:
        clocked = [r.found for r in results if r.found is not None]
        ratios = [c.ratio[name] for c in clocked if name in c.ratio]
        parts.append(
            f"- `{name}`: worst ratio {max(ratios):.2f}, geometric mean"
            f" {geometric_mean(ratios):.2f}"
        )
    return "\n\n".join(parts) + "\n"


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:.3g}"
