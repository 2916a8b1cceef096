"""What a solution costs, by mesh axes and by the user's lines."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rhino_jax.explore.why import Added
from rhino_jax.plan.records import Collective, Predicted
from rhino_jax.search.found import Found
from rhino_jax.search.read_back.assemble import costs_of


Line = tuple[str, tuple[str, ...], str, str]
"""Kind, axes, source, reason."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Attributes:
    predicted: of the step; None where nothing fits.
    step_s, bound_s: what was found, and what is proved.
    peak_bytes: of one device; the least that was met where nothing fits.
    by_axes: seconds of collectives.
    by_line: the same, by kind, axes, source and reason.
    """

    predicted: Predicted | None
    step_s: float
    bound_s: float
    peak_bytes: int
    by_axes: Mapping[tuple[str, ...], float]
    by_line: Mapping[Line, float]


def cost_of(found: Found) -> Cost:
    """What the best of a search costs."""
    best = found.solved[0]
    solution = best.solution
    if solution.labels is None:
        peak = math.ceil(solution.smallest_peak)
        return Cost(None, math.inf, math.inf, peak, {}, {})
    predicted, collectives, _ = costs_of(best.mesh_problem, solution.labels)
    return Cost(
        predicted,
        solution.objective,
        solution.bound,
        predicted.peak_bytes,
        _by_axes(collectives),
        _by_line(collectives),
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


def added(cost: Cost, planned: Cost) -> tuple[Added, ...]:
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
