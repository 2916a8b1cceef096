"""Report of a suite that runs pipelines."""

from __future__ import annotations

from collections.abc import Sequence

from rhino_jax.bench.rows.row_run import RowResult, RowTask, table_of_rows
from rhino_jax.bench.stages.run import Case, Piped
from rhino_jax.bench.suite import BenchRow, Suite
from rhino_jax.bench.tables.figures import geometric_mean
from rhino_jax.utils.codec import from_json


def stages_task() -> RowTask[Piped]:
    """Return the task that runs every row once, schedules in own processes."""
    return RowTask(
        name="stages",
        samples=1,
        is_by_method=False,
        read=lambda samples: from_json(Piped, samples[0]),
        line=_line,
    )


def _line(found: Piped) -> str:
    parts = [
        f"{c.schedule} {c.apart_ratio:.2f} ({c.hosted_ratio:.2f})" for c in found.cases
    ]
    return f"simulated ÷ measured (with the host's work): {', '.join(parts)}"


def stages_report(
    suite: Suite, results: Sequence[RowResult[Piped]], command: str
) -> str:
    """Return the times as Markdown: a line per row and schedule, and the extremes.

    Args:
      suite: the suite.
      results: results of all its rows.
      command: the command that repeats the run.
    """
    header = [
        "workload",
        "target",
        "schedule",
        "ms a task",
        "host ms a task",
        "ms",
        "simulated ÷ measured",
        "with the host's work",
    ]
    header += ["one device ÷ this", "one process ms", "simulated ÷ measured there"]
    lines = [
        RowResult(row=r.row, found=(case, r.found.one_device_s))
        for r in results
        if r.found is not None
        for case in r.found.cases
    ]
    failed: list[RowResult[tuple[Case, float]]] = [
        RowResult(row=r.row, found=None, error=r.error)
        for r in results
        if r.found is None
    ]

    def cells(row: BenchRow, found: tuple[Case, float]) -> list[str]:
        case, one_device_s = found
        return [
            row.workload,
            row.target,
            case.schedule,
            _ms(case.task_s),
            _ms(case.host_s),
            _ms(case.apart_s),
            f"{case.apart_ratio:.2f}",
            f"{case.hosted_ratio:.2f}",
            f"{one_device_s / case.apart_s:.2f}",
            _ms(case.together_s),
            f"{case.together_ratio:.2f}",
        ]

    return (
        "\n\n".join(
            [
                *table_of_rows(suite, [*lines, *failed], command, header, cells),
                "Stages in processes that have a core each, one device in each; then in"
                " one process, where they share XLA:CPU's threads. Simulated: with the"
                " median of what each task took when it was waited for, before and"
                " after; links as the hardware file has them. With the host's work:"
                " tasks last longer by the seconds of the core that a step takes beyond"
                " them, since a process that dispatches and sends has no other core."
                " One device has one core, and as many micro-batches.",
                *(f"- {line}" for line in stages_summary(suite.name, results)),
            ]
        )
        + "\n"
    )


def stages_summary(suite: str, results: Sequence[RowResult[Piped]]) -> tuple[str, ...]:
    """Return lines on the simulator's accuracy and the speed-up over one device."""
    cases = [
        (case, r.found.one_device_s)
        for r in results
        if r.found is not None
        for case in r.found.cases
    ]
    if not cases:
        return ()
    apart = [c.apart_ratio for c, _ in cases]
    hosted = [c.hosted_ratio for c, _ in cases]
    together = [c.together_ratio for c, _ in cases]
    faster = [one_s / c.apart_s for c, one_s in cases]
    return (
        f"`{suite}`, {len(cases)} pipelines that really run, simulated over measured:"
        f" {_span(apart)} in processes of their own, {_span(hosted)} with what their"
        f" cores do beside tasks, {_span(together)} in one process;"
        f" one device over the pipeline's: {_span(faster)}.",
    )


def _span(values: Sequence[float]) -> str:
    mean = geometric_mean(values)
    return f"{min(values):.2f} to {max(values):.2f} (geometric mean {mean:.2f})"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}"
