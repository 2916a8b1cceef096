"""Counts and seconds of a sweep."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Counts:
    """Work to find the best mesh within each of several budgets.

    Attributes:
      models: number of meshes for which a model was built.
      searches: number of searches, with and without a limit.
      reused: number of (mesh, budget) pairs whose result, or infeasibility, was known
        from a search within a larger budget or none.
      ruled_out: number of (mesh, budget) pairs whose lower bound was no faster than the
        best result.
    """

    models: int = 0
    searches: int = 0
    reused: int = 0
    ruled_out: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.models + other.models,
            self.searches + other.searches,
            self.reused + other.reused,
            self.ruled_out + other.ruled_out,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepWork:
    """Work of a sweep.

    Attributes:
      configurations: number of configurations.
      groups: number of groups of configurations that differ in their budgets alone.
      planned: number of configurations that were each planned in full, or are not
        possible.
      counts: meshes and searches of the others.
      processes: number of processes that searched.
      cpu_s: CPU seconds of all processes, their start included.
      seconds: wall-clock seconds.
    """

    configurations: int
    groups: int
    planned: int
    counts: Counts
    processes: int
    cpu_s: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Started:
    """Start time of a sweep."""

    clock_s: float = field(default_factory=time.monotonic)
    used_s: float = field(default_factory=time.process_time)

    def seconds(self) -> float:
        """Return wall-clock seconds since the start."""
        return time.monotonic() - self.clock_s

    def cpu_s(self) -> float:
        """Return CPU seconds of this process since the start."""
        return time.process_time() - self.used_s
