"""Progress of the runners, and a line for each result."""

from __future__ import annotations

import time
from collections.abc import Callable

from rhino_jax.bench.records import Measure, Result
from rhino_jax.bench.suite import BenchRow
from rhino_jax.explain.report.line import format_mesh
from rhino_jax.units import format_bytes, format_seconds


Report = Callable[[str], None]
"""Callback for lines of progress."""


class Clock:
    """Counter of cells that estimates the remaining time.

    Args:
      total: number of cells.
      done: number of cells finished by earlier runs.
      clock: monotonic clock, in seconds.
    """

    def __init__(
        self, *, total: int, done: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._total, self._done, self._before = total, done, done
        self._clock, self._started_s = clock, clock()

    def tick(self) -> str:
        """Count a finished cell; return `[12/96, 1 h 02 min left]`."""
        self._done += 1
        left = self._total - self._done
        if not left:
            return f"[{self._done}/{self._total}]"
        each_s = (self._clock() - self._started_s) / (self._done - self._before)
        return f"[{self._done}/{self._total}, {format_duration(each_s * left)} left]"


def format_duration(seconds: float) -> str:
    """Format seconds as `40 s`, `12 min`, `1 h 02 min`."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min"


def title_of(row: BenchRow) -> str:
    """Return a row's title."""
    mesh = format_mesh(row.mesh) if row.mesh else "mesh left to rhino"
    return f"{row.workload} ({row.regime}), {row.target}, {mesh}"


def line_of(result: Result) -> str:
    """Return a result in a line: compiled figures, with predicted ones in brackets."""
    said, made = result.predicted, result.compiled
    if not result.fits or said is None or made is None:
        first = result.error.splitlines()[0] if result.error else ""
        return f"{result.status}. {first}"
    parts = [
        f"{_seconds(made)} ({_seconds(said)})",
        f"{_bytes(made.wire_bytes)} ({_bytes(said.wire_bytes)}) sent",
        f"{_bytes(made.peak_bytes)} ({_bytes(said.peak_bytes)}) held",
        f"planned in {format_seconds(result.plan_s or 0)}",
        f"compiled in {format_seconds(result.compile_s or 0)}",
    ]
    if result.rematerialised:
        parts.append(f"{result.rematerialised} rematerialised in full")
    return ", ".join(parts)


def _seconds(measure: Measure) -> str:
    return "?" if measure.step_time_s is None else format_seconds(measure.step_time_s)


def _bytes(count: int | None) -> str:
    return "?" if count is None else format_bytes(count)
