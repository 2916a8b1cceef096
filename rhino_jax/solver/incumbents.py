"""Limits on a search's work, and the assignments found so far."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from rhino_jax.solver.problem import Labels, Problem


Report = Callable[[float | None, float | None], None]


@dataclass(frozen=True, slots=True)
class Effort:
    """Limits on the work of a search.

    Attributes:
      max_starts: number of known assignments to improve, the best first.
      max_rounds: number of message rounds, each in both orders.
      near: relative gap at which message passing stops.
      deterministic_s: CP-SAT's deterministic limit for models with memory; 0: CP-SAT
        neither solves these nor proves small problems without memory (see
        `parameters.CpSat`).
      max_fusions: number of times that CP-SAT combines good assignments.
      fuses_early: whether it also does so before message passing.
      worth_s: assignments that cost more are improved only up to the first move without
        gain, and not searched further.
      cutoff_s: the search stops if every assignment is proved to cost more.
      max_prices: number of memory multipliers to try.
      max_weights: number of weights of hidable time to try (see `overlap`).
      proves: whether to search where only the bound can improve.
      deadline: `time.monotonic()` at which the search returns its best result.
      seed: seed of CP-SAT.
    """

    max_starts: int = 5
    max_rounds: int = 120
    near: float = 3e-3
    deterministic_s: float = 2.0
    max_fusions: int = 3
    fuses_early: bool = True
    worth_s: float = math.inf
    cutoff_s: float = math.inf
    max_prices: int = 12
    max_weights: int = 4
    proves: bool = True
    deadline: float = math.inf
    seed: int = 0


EFFORTS = {
    "fast": Effort(
        max_starts=3,
        max_rounds=40,
        near=0.03,
        deterministic_s=0.0,
        max_fusions=1,
        max_prices=6,
        max_weights=3,
        proves=False,
    ),
    "best": Effort(),
}
RECIPE_EFFORTS = {
    "fast": Effort(
        max_starts=2, max_rounds=0, deterministic_s=0.0, max_fusions=0, max_prices=0
    ),
    "best": Effort(
        max_starts=2,
        max_rounds=5,
        deterministic_s=0.0,
        max_fusions=1,
        fuses_early=False,
        max_prices=0,
    ),
}
"""Efforts by level: `EFFORTS` for the search on one mesh, these for each recipe."""


@dataclass(slots=True, eq=False)
class Incumbents:
    """The assignments found so far, and the best of those that fit.

    Attributes:
      problem: the problem, for their memory.
      value: returns the cost of an assignment.
      report: called with each new best value or bound.
    """

    problem: Problem
    value: Callable[[Labels], float]
    report: Report
    best: Labels | None = None
    best_value: float = math.inf
    best_peak: float = math.inf
    smallest_peak: float = math.inf
    members: list[Labels] = field(default_factory=list)

    def offer(self, labels: Labels) -> bool:
        """Record an assignment and return whether it fits."""
        peak = self.problem.peak(labels)
        self.smallest_peak = min(self.smallest_peak, peak)
        self.members.append(labels)
        if peak > self.problem.limit:
            return False
        value = self.value(labels)
        if value < self.best_value:
            self.best, self.best_value, self.best_peak = labels, value, peak
            self.report(value, None)
        return True
