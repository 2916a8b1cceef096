"""Solution of a problem: without memory first, with memory if the limit binds; at a
sequence of weights of hidable time (see `overlap`).

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

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from rhino_jax.solver.incumbents import Effort, Incumbents, Report
from rhino_jax.solver.least_peak import least_possible, low_peaks, minimum_peak
from rhino_jax.solver.memory_search import DualSolution, search_memory
from rhino_jax.solver.moves.fusion import Fused, fuse
from rhino_jax.solver.overlap import Overlap, descend
from rhino_jax.solver.pairwise import PairwiseSolution, solve_pairwise
from rhino_jax.solver.parameters import WEIGHTS
from rhino_jax.solver.problem import Labels, Problem


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


@dataclass(frozen=True, eq=False)
class Solution:
    """The result of a search.

    Attributes:
      labels: one option per node; None if no assignment fits the limit.
      objective: cost of `labels`.
      bound: proved lower bound on the objective.
      peak: memory peak of `labels`.
      lowest_peak: lowest peak of the assignments met; infinite where none is.
      variables: variables of the last CP-SAT model; 0 without one.
      nodes: number of nodes before and after reduction.
      dual: result of the search for memory multipliers; None if the limit does not
        bind.
      last: the last weight of hidable time, and its solution without memory.
      unfit: the problem, where it is proved that no assignment fits.
    """

    labels: Labels | None
    objective: float
    bound: float
    peak: float
    lowest_peak: float
    variables: int
    nodes: tuple[int, int]
    dual: DualSolution | None = None
    last: tuple[float, PairwiseSolution] | None = None
    unfit: Problem | None = None

    @cached_property
    def smallest_peak(self) -> float:
        """Smallest peak of any assignment found. Where none fits it is searched when it
        is asked for: most of such results are dropped without."""
        if self.unfit is None:
            return self.lowest_peak
        return self.unfit.peak(minimum_peak(self.unfit))

    @property
    def gap(self) -> float:
        if self.labels is None or self.objective <= 0:
            return 0.0
        return max(0.0, (self.objective - self.bound) / self.objective)


def solve(
    problem: Problem,
    starts: Sequence[Labels],
    effort: Effort,
    report: Report = lambda best, bound: None,
) -> Solution:
    """Minimise a problem under its memory limit.

    Args:
      problem: the problem to minimise.
      starts: known assignments; the result is never worse than the best of them that
        fits.
      effort: limits on the search's work.
      report: called with new best objectives and bounds.
    """
    return solve_overlapped(Overlap.none(problem), starts, effort, report)


def solve_overlapped(
    overlap: Overlap,
    starts: Sequence[Labels],
    effort: Effort,
    report: Report,
    before: Solution | None = None,
) -> Solution:
    """Minimise T. The result is never worse than the best start that fits.

    Args:
      overlap: the problem.
      starts, effort, report: as in `solve`.
      before: the result of a search of the same problem with less effort or another
        limit, whose last weight and messages the search starts from.
    """
    problem = overlap.problem
    if least_possible(problem) > problem.limit:
        inf, count = math.inf, len(problem.costs)
        return Solution(None, inf, 0.0, inf, inf, 0, (count, count), unfit=problem)
    incumbents = Incumbents(problem, overlap.step_s, report)
    known = [s for s in starts if incumbents.offer(np.asarray(s, dtype=np.int64))]
    weights, bound = Weights(overlap, effort.proves), 0.0
    weight, found = weights.first(incumbents.best), None
    if before is not None and before.last is not None:
        weight, found = before.last
    dual: DualSolution | None = None
    # Without proofs, for weights whose bound does not matter.
    near = max(effort.near, WEIGHTS.briefly_near)
    brief = replace(effort, near=near, deterministic_s=0.0)
    while True:
        # At intermediate weights the bound does not matter.
        is_brief = weight not in (1.0, WEIGHTS.least) and not weights.is_bounding
        weighted = overlap.weighted(weight)
        mine = known
        if incumbents.best is not None and not overlap.hides_nothing:
            mine = [incumbents.best, *known]
        found = solve_pairwise(weighted, mine, brief if is_brief else effort, found)
        variables = found.variables
        bound = max(bound, found.bound)
        if problem.peak(found.labels) > problem.limit:
            fused, dual = _within_memory(overlap, incumbents, found, weight, effort)
            if dual is not None:
                bound = max(bound, dual.bound)
                report(None, bound)
            if fused is not None:
                bound, variables = max(bound, fused.bound), fused.variables
            break
        labels = min([*mine, found.labels], key=weighted.objective)
        # Improved node by node; of the smallest weight only what is much better, since
        # it hides more.
        polished = labels if overlap.hides_nothing else descend(overlap, labels)
        gained_s = incumbents.best_value - overlap.step_s(polished)
        if weight != WEIGHTS.least or gained_s > WEIGHTS.preferred * bound:
            incumbents.offer(polished)
        report(None, bound)
        if overlap.hides_nothing or bound > effort.cutoff_s:
            break
        weights.learn(weight, labels)
        if len(weights.tried) >= effort.max_weights:
            break
        later = weights.next()
        if later is None or time.monotonic() > effort.deadline:
            break
        weight = later
    return Solution(
        incumbents.best,
        incumbents.best_value,
        min(bound, incumbents.best_value),
        incumbents.best_peak,
        incumbents.smallest_peak,
        variables,
        (len(problem.costs), found.nodes),
        dual,
        (weight, found),
    )


def _within_memory(
    overlap: Overlap,
    incumbents: Incumbents,
    found: PairwiseSolution,
    weight: float,
    effort: Effort,
) -> tuple[Fused | None, DualSolution | None]:
    """Search for assignments within the limit, which `found` exceeds, unless all are
    proved to cost more than the cutoff."""
    if found.bound > effort.cutoff_s:
        return None, None
    problem = overlap.problem
    incumbents.offer(found.labels)
    if incumbents.best is None:
        for low_choice in low_peaks(problem):
            incumbents.offer(low_choice)
    dual = search_memory(overlap, incumbents, found, weight, effort)
    if dual is None:
        return None, None
    fused = None
    if effort.proves or incumbents.best is None:
        weighted = overlap.weighted(dual.prices.weight)
        fused = fuse(weighted, incumbents.best, dual.choices, effort)
        if fused.labels is not None:
            incumbents.offer(fused.labels)
    if incumbents.best is not None:
        incumbents.offer(descend(overlap, incumbents.best))
    return fused, dual
