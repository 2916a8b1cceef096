"""Progress of the runners, and a line for each result."""

from __future__ import annotations

import time
from collections.abc import Callable

from rhino_jax.bench.records import Result
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


def line_of(result: Result) -> str:
    """Return a result in a line: compiled figures, with predicted ones in brackets."""
    said, made = result.predicted, result.compiled
    if not result.fits or said is None or made is None:
        first = result.error.splitlines()[0] if result.error else ""
        return f"{result.status}. {first}"

    def both(form: Callable[[float], str], quantity: str) -> str:
        return f"{form(getattr(made, quantity))} ({form(getattr(said, quantity))})"

    parts = [
        both(format_seconds, "step_time_s"),
        f"{both(format_bytes, 'wire_bytes')} sent",
        f"{both(format_bytes, 'peak_bytes')} held",
        f"planned in {format_seconds(result.plan_s or 0)}",
        f"compiled in {format_seconds(result.compile_s or 0)}",
    ]
    if result.rematerialised:
        parts.append(f"{result.rematerialised} rematerialised in full")
    return ", ".join(parts)
