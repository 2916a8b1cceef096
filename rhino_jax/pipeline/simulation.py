"""A simulated step, with its views: table, timeline, trace."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike

from rhino_jax.pipeline import timeline, trace
from rhino_jax.pipeline.times import Times
from rhino_jax.units import format_bytes, format_seconds, format_share


@dataclass(frozen=True)
class Simulation(Times):
    """One simulated step of a schedule."""

    def __repr__(self) -> str:
        graph = self.schedule.graph
        return (
            f"Simulation({self.schedule.name}, {graph.groups} groups,"
            f" {len(graph.tasks)} tasks: {format_seconds(self.step_time_s)}/step,"
            f" bubble {format_share(self.bubble)},"
            f" peak {format_bytes(self.peak_bytes)})"
        )

    def table(self, width: int = 100) -> str:
        """Return the step as text: a timeline, then idle time, waits and memory."""
        return timeline.to_text(self, width)

    def save_trace(self, path: str | PathLike[str]) -> None:
        """Write the step for Perfetto or chrome://tracing.

        Args:
          path: ends in `.json`, or in `.json.gz` for a compressed file.
        Raises:
          WriteError: the file cannot be written.
        """
        trace.save(self, path)
