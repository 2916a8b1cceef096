"""How much work a search may do, and the choices it has met."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from rhino_jax.solver.problem import Labels, Problem


Report = Callable[[float | None, float | None], None]


@dataclass(frozen=True, slots=True)
class Effort:
    """How much work the search may do.

    Attributes:
      max_starts: choices that are climbed from: known ones, the best first.
      max_rounds: rounds of messages, each there and back.
      near: share of a choice's cost to the bound at which messages stop.
      deterministic_s: CP-SAT's deterministic limit where it chooses with memory; 0: it
        does not, nor proves small problems without (see `parameters.CpSat`).
      max_fusions: how often CP-SAT puts good choices together.
      fuses_early: whether it does so before messages, too.
      worth_s: what costs more is climbed from once, up to the first move that gains
        nothing, and not searched further.
      cutoff_s: what is proved to cost more is not searched further.
      max_prices: how many memory prices are tried.
      max_weights: how many weights of what can hide (see `overlap`).
      proves: whether to search where that gives but a better bound.
      deadline: `time.monotonic()` at which the search returns what it has.
      seed: of CP-SAT.
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
"""Of the search on one mesh, and of each recipe, by level."""


@dataclass(slots=True, eq=False)
class Incumbents:
    """Choices that were met, and of those that fit the best.

    Attributes:
      problem: whose memory they hold.
      value: of a choice, the less the better.
      report: called with new best values and bounds.
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
        """Take a choice in; True where it fits."""
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
