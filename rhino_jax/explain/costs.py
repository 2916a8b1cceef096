"""Cost of a solution, by mesh axes and by the user's source lines."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rhino_jax.explain.why import Added
from rhino_jax.plan.records import Collective, Predicted
from rhino_jax.planner.search.found import SearchResult
from rhino_jax.planner.search.read_back.assemble import costs_of


Line = tuple[str, tuple[str, ...], str, str]
"""Kind, axes, source, reason."""


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """Effect of one stage's layout on the rest of a plan in stages.

    Attributes:
      stage: the stage whose layout is evaluated.
      step_s: simulated seconds of the whole pipeline's step; infinite if a stage does
        not fit.
      cannot: message that says which stage does not fit in memory; empty if all fit.
      longest: the stage with the longest step.
      others: (stage, change of its seconds against the plan) of the other stages.
      sent: (source stage, target stage, change of the transfer's seconds against the
        plan).
    """

    stage: int
    step_s: float
    cannot: str = ""
    longest: int = 0
    others: tuple[tuple[int, float], ...] = ()
    sent: tuple[tuple[int, int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class CostTerms:
    """Cost of a solution, as totals and by axes and source lines.

    Attributes:
      predicted: predictions of the step; None if nothing fits in memory.
      step_s, bound_s: the solver's objective and its proved lower bound, in seconds.
      peak_bytes: peak memory of one device; the lowest peak that the search met if
        nothing fits.
      by_axes: mesh axes → seconds of their collectives, hidden ones included.
      by_line: (kind, axes, source, reason) → seconds of these collectives.
      elsewhere: effect on the other stages, if the cost is that of one stage; None for
        one mesh.
      is_brief: whether it was searched with the brief `fast` level only.
    """

    predicted: Predicted | None
    step_s: float
    bound_s: float
    peak_bytes: int
    by_axes: Mapping[tuple[str, ...], float]
    by_line: Mapping[Line, float]
    elsewhere: Elsewhere | None = None
    is_brief: bool = False

    @classmethod
    def of_nothing(cls, elsewhere: Elsewhere) -> CostTerms:
        """Return the infinite cost of a layout with which a stage does not fit."""
        return cls(None, math.inf, math.inf, 0, {}, {}, elsewhere)

    @property
    def rank(self) -> tuple[float, ...]:
        """Sort key, lowest best.

        Solutions at the plan's search level precede brief ones. The step's seconds
        count first, those of stages that the step does not wait for second, peak bytes
        last.
        """
        took_s = self.step_s
        if self.elsewhere is not None:
            took_s += sum(delta for _, delta in self.elsewhere.others)
        return self.is_brief, self.total_s, took_s, self.peak_bytes

    @property
    def hidden_s(self) -> float:
        """Seconds of collectives that compute hides."""
        exposed_s = 0.0 if self.predicted is None else self.predicted.communication_s
        return sum(self.by_line.values()) - exposed_s

    @property
    def total_s(self) -> float:
        """Seconds of the whole step; for a plan in stages, of its pipeline."""
        return self.step_s if self.elsewhere is None else self.elsewhere.step_s


def cost_of(found: SearchResult, is_brief: bool = False) -> CostTerms:
    """Return the cost of a search's best solution.

    Args:
      found: the search result.
      is_brief: whether that search was a brief one.
    """
    best = found.solved[0]
    solution = best.solution
    if solution.labels is None:
        peak = math.ceil(solution.smallest_peak)
        return CostTerms(None, math.inf, math.inf, peak, {}, {}, is_brief=is_brief)
    predicted, collectives, _ = costs_of(best.mesh_problem, solution.labels)
    return CostTerms(
        predicted,
        solution.objective,
        solution.bound,
        predicted.peak_bytes,
        _by_axes(collectives),
        _by_line(collectives),
        is_brief=is_brief,
    )


def _by_axes(collectives: Sequence[Collective]) -> dict[tuple[str, ...], float]:
    sums: dict[tuple[str, ...], float] = defaultdict(float)
    for c in collectives:
        sums[c.axes] += c.seconds
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


def _by_line(collectives: Sequence[Collective]) -> dict[Line, float]:
    sums: dict[Line, float] = defaultdict(float)
    for c in collectives:
        sums[c.kind, c.axes, c.source, c.reason] += c.seconds
    return sums


def added(cost: CostTerms, planned: CostTerms) -> tuple[Added, ...]:
    """Return the collectives that one solution has more or less of than the plan.

    The largest change in seconds comes first; collectives without a change are left
    out.
    """
    deltas = {
        line: cost.by_line.get(line, 0.0) - planned.by_line.get(line, 0.0)
        for line in {**cost.by_line, **planned.by_line}
    }
    order = sorted(deltas.items(), key=lambda item: (-abs(item[1]), item[0]))
    return tuple(
        Added(kind, axes, seconds, source, reason)
        for (kind, axes, source, reason), seconds in order
        if seconds
    )
