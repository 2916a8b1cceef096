"""The sequence of weights of hidable time that are tried (see `overlap`).

At every weight the problem is an ordinary one, and the cost of an assignment is linear
in the weight, between its two ends: all hidable time hidden, and hidden up to the
compute budget. The minimum over assignments is concave, and its maximum the best bound
that weights give. It lies between a weight whose assignment has exposed communication
and one whose assignment hides all.

If even the smallest weight leaves communication exposed, the crossing of the lines is
tried, for the bound; otherwise the middle, for its assignments.

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
      overlap: the problem that is searched.
      proves: whether to try weights that can only improve the bound.
      low: (weight, (cost at 0, cost at 1)) of the largest weight whose assignment has
        exposed communication.
      high: (weight, (cost at 0, cost at 1)) of the smallest weight whose assignment
        hides all.
      tried: all weights so far.
    """

    overlap: Overlap
    proves: bool
    low: tuple[float, tuple[float, float]] | None = None
    high: tuple[float, tuple[float, float]] | None = None
    tried: list[float] = field(default_factory=list)

    def first(self, best: Labels | None) -> float:
        """Return the first weight to try.

        Args:
          best: the best known assignment; None: none.
        """
        if best is None or self.overlap.hides_nothing or self.overlap.is_exposed(best):
            return 1.0
        return WEIGHTS.hidden

    def learn(self, weight: float, labels: Labels) -> None:
        """Record the best assignment at a weight."""
        self.tried.append(weight)
        found = weight, self.overlap.ends_s(labels)
        if self.overlap.is_exposed(labels):
            self.low = found
        else:
            self.high = found

    def next(self) -> float | None:
        """Return the next weight to try; None if no other can improve the result."""
        low = 0.0 if self.low is None else self.low[0]
        high = 1.0 if self.high is None else self.high[0]
        if low == 1.0 or high == WEIGHTS.least:
            return None
        if high <= WEIGHTS.hidden and WEIGHTS.least not in self.tried:
            return WEIGHTS.least if self.proves else None
        # If communication is exposed, the objective at weight 1 may be T itself.
        if self.high is None:
            return 1.0
        if WEIGHTS.hidden not in self.tried and low < WEIGHTS.hidden < high:
            return WEIGHTS.hidden
        return self._crossing() if low == WEIGHTS.least else (low + high) / 2

    @property
    def is_bounding(self) -> bool:
        """Whether the next weight is tried for its bound, not for its assignment."""
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
