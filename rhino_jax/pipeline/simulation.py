"""A simulated step, with the ways to look at it."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike

from rhino_jax.pipeline import timeline, trace
from rhino_jax.pipeline.times import Times


@dataclass(frozen=True)
class Simulation(Times):
    """One step of a schedule, by the clock."""

    def table(self, width: int = 100) -> str:
        """The step as text: a line of tasks for every group, then what it idles, waits
        and holds."""
        return timeline.to_text(self, width)

    def save_trace(self, path: str | PathLike[str]) -> None:
        """Write the step for Perfetto or chrome://tracing.

        Args:
          path: ends in `.json`, or in `.json.gz` for a compressed file.
        """
        trace.save(self, path)
