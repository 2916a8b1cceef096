"""Measurements of pipelines that run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Measurements of one schedule of a row.

    Attributes:
      schedule: its name.
      task_s: median seconds of a task of micro-batches.
      apart_s, apart_simulated_s: seconds of a step, with stages in processes that have
        a core each: measured, and simulated from the measured seconds of every task.
      apart_hosted_s: simulated from these and from the host overhead of the processes:
        the core's seconds of a step outside of tasks, distributed over the tasks.
      host_s: host overhead of one task, in the process with the larger one.
      together_s, together_simulated_s: seconds of a step in one process, whose stages
        share XLA:CPU's threads: measured, and simulated.
    """

    schedule: str
    task_s: float
    apart_s: float
    apart_simulated_s: float
    apart_hosted_s: float
    host_s: float
    together_s: float
    together_simulated_s: float

    @property
    def apart_ratio(self) -> float:
        """Simulated over measured, in separate processes."""
        return self.apart_simulated_s / self.apart_s

    @property
    def hosted_ratio(self) -> float:
        """Simulated with host overhead over measured, in separate processes."""
        return self.apart_hosted_s / self.apart_s

    @property
    def together_ratio(self) -> float:
        """Simulated over measured, in one process."""
        return self.together_simulated_s / self.together_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Piped:
    """Measurements of one row.

    Attributes:
      one_device_s: seconds of the same step on one device that has one core, in as many
        micro-batches.
      cases: measurements of every schedule.
    """

    one_device_s: float
    cases: tuple[Case, ...]

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Piped:
        cases: Sequence[Mapping[str, Any]] = values["cases"]
        return cls(
            one_device_s=values["one_device_s"],
            cases=tuple(Case(**case) for case in cases),
        )
