"""What a sweep took."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Counts:
    """What it took to find the best mesh within each of several budgets.

    Attributes:
      models: meshes on which a program was priced.
      searches: with and without a limit.
      reused: meshes, each time within one budget, of which it was known what is best
        there, or that nothing fits, from a search within a larger one or none.
      ruled_out: the same, whose proved bound is no faster than what was found.
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
    """What a sweep took.

    Attributes:
      configurations: all.
      groups: the same, those that differ in their budgets alone counted once.
      planned: configurations that were each planned in full, or cannot be.
      counts: meshes and searches of the others.
      processes: that searched.
      cpu_s: of all processes, their start included.
      seconds: by the clock.
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
    """When a sweep began."""

    clock_s: float = field(default_factory=time.monotonic)
    used_s: float = field(default_factory=time.process_time)

    def seconds(self) -> float:
        """Since, by the clock."""
        return time.monotonic() - self.clock_s

    def cpu_s(self) -> float:
        """Of this process, since."""
        return time.process_time() - self.used_s
