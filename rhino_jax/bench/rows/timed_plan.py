"""Plans with the time that planning took, and the speed of the machine meanwhile.

Times of planning are those of Python and NumPy on one core, which on shared machines
differ by a factor of two from one hour to the next: `yardstick_s` measures the current
speed of the machine, so that tables of different hours are comparable.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rhino_jax.pipeline.of_plan import schedule_of
from rhino_jax.pipeline.simulator import simulate
from rhino_jax.plan.plan import PlanData


ADDITIONS = 10_000_000
"""Number of additions of the timed loop."""


def yardstick_s() -> float:
    """Return the CPU seconds of `ADDITIONS` additions in a Python loop."""
    started = time.process_time()
    total = 0
    for i in range(ADDITIONS):
        total += i
    return time.process_time() - started


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedPlan:
    """One plan of a row. What a kind of suites does not measure is 0 or empty.

    Attributes:
      method: name of the method.
      error: why there is no plan; then all that is of the plan is 0 or empty.
      mesh: mesh of all devices: axis → size.
      places: number of places of every stage along the stage axis; empty without
        stages.
      micro_batches: number of micro-batches.
      schedule: name of the schedule; empty without stages.
      step_s, ideal_s: predicted step, and that of the busiest stage alone, in seconds.
      bubble: idle share of all devices' time.
      peak_bytes: peak memory of the fullest device.
      gap: proved limit of the plan's relative distance to the optimum on its mesh.
      num_ops: number of ops of the program, regions counted once.
      num_nodes: choices of the search problem, before and after folding and reduction.
      plan_s: wall-clock seconds of planning.
      cpu_s: CPU seconds of planning, by pass; "all" where passes are not measured.
      held_bytes: peak memory of the process, JAX and the trace included.
      yardstick_s: seconds of `yardstick_s`, measured before planning.
    """

    method: str
    error: str = ""
    mesh: Mapping[str, int] = field(default_factory=dict)
    places: tuple[int, ...] = ()
    micro_batches: int = 1
    schedule: str = ""
    step_s: float = 0.0
    ideal_s: float = 0.0
    bubble: float = 0.0
    peak_bytes: int = 0
    gap: float = 0.0
    num_ops: int = 0
    num_nodes: tuple[int, int] = (0, 0)
    plan_s: float = 0.0
    cpu_s: Mapping[str, float] = field(default_factory=dict)
    held_bytes: int = 0
    yardstick_s: float = 0.0

    @classmethod
    def of(cls, method: str, plan: PlanData, **measured: Any) -> TimedPlan:
        """Return a method's plan, with what was measured."""
        pipeline, step_s = plan.pipeline, plan.predicted.step_time_s
        return cls(
            method=method,
            mesh=dict(plan.mesh_axes),
            places=plan.places if pipeline else (),
            micro_batches=plan.microbatches,
            schedule=plan.schedule if pipeline else "",
            step_s=step_s,
            ideal_s=max(pipeline.busy_s) if pipeline else step_s,
            bubble=simulate(schedule_of(pipeline)).bubble if pipeline else 0.0,
            peak_bytes=plan.predicted.peak_bytes,
            gap=plan.search.gap,
            num_nodes=plan.search.nodes,
            **measured,
        )

    @property
    def total_s(self) -> float:
        """All CPU seconds of planning."""
        return math.fsum(self.cpu_s.values())

    @property
    def shape(self) -> str:
        """Sizes of the mesh, as `4 × 2`."""
        return " × ".join(map(str, self.mesh.values()))


Plans = Sequence[TimedPlan]
"""A row's plans, one for every method."""
