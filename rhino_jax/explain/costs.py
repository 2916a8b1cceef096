"""What a solution costs, by mesh axes and by the user's lines."""

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
    """What becomes of the rest of a plan in stages.

    Attributes:
      stage: of which the cost is.
      step_s: of the pipeline, by the clock.
      cannot: which stage does not fit.
      longest: the stage that works longest.
      others: (stage, seconds that it works longer than in the plan) of the others.
      sent: (stage, stage, seconds more that what passes between them takes).
    """

    stage: int
    step_s: float
    cannot: str = ""
    longest: int = 0
    others: tuple[tuple[int, float], ...] = ()
    sent: tuple[tuple[int, int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class CostTerms:
    """Attributes:
    predicted: of the step; None where nothing fits.
    step_s, bound_s: what was found, and what is proved.
    peak_bytes: of one device; the least that was met where nothing fits.
    by_axes: seconds of collectives.
    by_line: the same, by kind, axes, source and reason.
    elsewhere: where all these are of one stage.
    is_brief: it was searched briefly.
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
        """Of a layout with which a stage does not fit."""
        return cls(None, math.inf, math.inf, 0, {}, {}, elsewhere)

    @property
    def rank(self) -> tuple[float, ...]:
        """The best is the least, of what was searched as the plan was first; what no
        stage waits for counts by its seconds."""
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
        """Of a whole step."""
        return self.step_s if self.elsewhere is None else self.elsewhere.step_s


def cost_of(found: SearchResult, is_brief: bool = False) -> CostTerms:
    """What the best of a search, a brief one or not, costs."""
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
    """What one solution sends more or less than another; what changes most first."""
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
