"""Plans that promise about as much as the best: what the compiler is asked about.

The model's errors are mostly in what communication costs, so besides the recipes the
runners-up are the best choices where communication is dearer and cheaper than the
model says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rhino_jax.plan.plan import Plan
from rhino_jax.search.extract import overlap_of
from rhino_jax.search.pool import Effort
from rhino_jax.search.problem import Labels, PairTable, Problem
from rhino_jax.search.records import Found
from rhino_jax.search.solve import solve


COMMUNICATION_WEIGHTS = (2.0, 0.5)
"""What runners-up take communication to cost, over what the model says."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan to compile.

    Attributes:
      name: "best", a recipe, "less communication", "more communication", or one of
        these on another mesh, as "best on 2x4".
      plan: the plan.
    """

    name: str
    plan: Plan


def candidates_of(
    found: Sequence[Found], effort: Effort, count: int
) -> list[tuple[str, Found]]:
    """The most promising choices that differ, at most `count`.

    Always first is the best; the best recipe comes along wherever it fits, then the
    others by their predicted time.

    Args:
      found: the searched meshes, best first; where nothing was found on the first,
        it alone is returned.
      effort: for runners-up.
      count: most choices to return; at least 1.
    """
    best = found[0]
    if best.solution.labels is None or count <= 1:
        return [("best", best)]
    recipes = sorted(_recipes(best), key=lambda c: c[1].solution.objective)
    others = [
        *_reweighted(best, effort),
        *((f"best on {_shape(f)}", f) for f in found[1:]),
        *recipes[1:],
    ]
    ranked = [
        ("best", best),
        *recipes[:1],
        *sorted(others, key=lambda c: c[1].solution.objective),
    ]
    kept: list[tuple[str, Found]] = []
    for name, one in ranked:
        if one.solution.labels is not None and not any(
            _is_same(one, other) for _, other in kept
        ):
            kept.append((name, one))
    return kept[:count]


def _is_same(one: Found, other: Found) -> bool:
    a, b = one.solution.labels, other.solution.labels
    if a is None or b is None or one.drawn is not other.drawn:
        return False
    return bool((a == b).all())


def _shape(found: Found) -> str:
    return "x".join(str(a.size) for a in found.drawn.model.mesh.axes)


def _recipes(found: Found) -> list[tuple[str, Found]]:
    """The recipes that fit."""
    return [
        (name, chosen(found, labels))
        for name, labels in found.drawn.recipes.items()
        if labels is not None and _fits(found, labels)
    ]


def _fits(found: Found, labels: Labels) -> bool:
    problem = found.drawn.model.problem
    return problem.peak(labels) <= problem.limit


def chosen(found: Found, labels: Labels) -> Found:
    """Another choice in the same model, under the same bound."""
    overlap = overlap_of(found.drawn.model)
    peak = overlap.problem.peak(labels)
    solution = replace(
        found.solution, labels=labels, objective=overlap.step_s(labels), peak=peak
    )
    return replace(found, solution=solution)


def _reweighted(found: Found, effort: Effort) -> list[tuple[str, Found]]:
    """The best choices where communication costs more, and less."""
    model, best = found.drawn.model, found.solution.labels
    assert best is not None
    named = []
    for weight in COMMUNICATION_WEIGHTS:
        problem = _with_weight(model.problem, model.compute_costs(), weight)
        labels = solve(problem, [best], effort).labels
        assert labels is not None, "the best plan fits"
        name = "less communication" if weight > 1 else "more communication"
        named.append((name, chosen(found, labels)))
    return named


def _with_weight(
    problem: Problem, compute: Sequence[np.ndarray], weight: float
) -> Problem:
    return replace(
        problem,
        costs=[
            c + weight * (total - c)
            for total, c in zip(problem.costs, compute, strict=True)
        ],
        edges=[PairTable(e.source, e.target, weight * e.table) for e in problem.edges],
    )
