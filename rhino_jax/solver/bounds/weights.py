"""Which weights of what can hide are tried, one after the other (see `overlap`).

At every weight the problem is an ordinary one, and what a choice costs is a line in the
weight, between its two ends: where all hides, and where compute hides all that it can.
The least of all lines is concave, and its top the best bound that weights give. It lies
between a weight whose choice leaves something exposed and one whose choice hides all.

Where even the least weight leaves something exposed, the lines' crossing is tried, for
the bound; elsewhere the middle, for its choices.

Source: Kelley, "The Cutting-Plane Method for Solving Convex Programs", SIAM 8 (1960).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rhino_jax.solver.overlap import Overlap
from rhino_jax.solver.parameters import WEIGHTS
from rhino_jax.solver.problem import Labels


@dataclass(slots=True, eq=False)
class Weights:
    """The weights of one search.

    Attributes:
      overlap: what is searched.
      proves: whether to try a weight that gives but a better bound.
      low: the largest weight at which something stays exposed, with what the choice
        there costs at 0 and at 1.
      high: the smallest at which all is hidden, likewise.
      tried: all so far.
    """

    overlap: Overlap
    proves: bool
    low: tuple[float, tuple[float, float]] | None = None
    high: tuple[float, tuple[float, float]] | None = None
    tried: list[float] = field(default_factory=list)

    def first(self, best: Labels | None) -> float:
        """The weight to begin with.

        Args:
          best: the best choice that is known, if any.
        """
        if best is None or self.overlap.hides_nothing or self.overlap.is_exposed(best):
            return 1.0
        return WEIGHTS.hidden

    def learn(self, weight: float, labels: Labels) -> None:
        """Take in the best choice at a weight."""
        self.tried.append(weight)
        found = weight, self.overlap.ends_s(labels)
        if self.overlap.is_exposed(labels):
            self.low = found
        else:
            self.high = found

    def next(self) -> float | None:
        """The weight to try next, or None where no other says more."""
        low = 0.0 if self.low is None else self.low[0]
        high = 1.0 if self.high is None else self.high[0]
        if low == 1.0 or high == WEIGHTS.least:
            return None
        if high <= WEIGHTS.hidden and WEIGHTS.least not in self.tried:
            return WEIGHTS.least if self.proves else None
        # Where something stays exposed, T itself may be what counts.
        if self.high is None:
            return 1.0
        if WEIGHTS.hidden not in self.tried and low < WEIGHTS.hidden < high:
            return WEIGHTS.hidden
        return self._crossing() if low == WEIGHTS.least else (low + high) / 2

    @property
    def is_bounding(self) -> bool:
        """Whether the bound at the next weight is what counts, not its choice."""
        return self.low is not None and self.low[0] == WEIGHTS.least

    def _crossing(self) -> float | None:
        assert self.low is not None and self.high is not None
        (low, (a0, a1)), (high, (b0, b1)) = self.low, self.high
        steeper = (a1 - a0) - (b1 - b0)
        if steeper <= 0:
            return None
        weight = (b0 - a0) / steeper
        margin = WEIGHTS.narrow * (high - low)
        return weight if low + margin < weight < high - margin else None
