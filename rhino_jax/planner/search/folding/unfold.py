"""Repeated nodes that choose differently, where memory binds.

Nodes of one orbit save memory all or none: where half of the layers would have to save,
all do. Choices of the orbits that are cheapest at the best Lagrange multipliers of
memory, of which some fit and some do not, are merged node by node.
"""

from __future__ import annotations

import time
from dataclasses import replace

from rhino_jax.planner.search.folding.symmetry import Symmetry
from rhino_jax.solver.bounds.prices import TimePrices
from rhino_jax.solver.incumbents import Effort
from rhino_jax.solver.memory_search import LONG_ROUNDS
from rhino_jax.solver.moves.fusion import fuse
from rhino_jax.solver.overlap import Overlap, descend
from rhino_jax.solver.pairwise import solve_pairwise
from rhino_jax.solver.problem import Labels
from rhino_jax.solver.solve import Solution


def unfold(
    whole: Overlap, symmetry: Symmetry, found: Solution, effort: Effort
) -> Solution:
    """Return the solution of all nodes: the orbits' solution expanded, or a better one.

    Its bound is that of plans in which repeated nodes share a choice, unless the
    solution is below it.

    Args:
      whole: the problem of all nodes.
      symmetry: their orbits.
      found: the solution of the orbits, of which none may fit.
      effort: limits of the search.
    """
    known = None if found.labels is None else symmetry.expand(found.labels)
    tied = replace(found, labels=known)
    is_over = known is not None and time.monotonic() > effort.deadline
    if found.dual is None or not effort.max_fusions or is_over:
        return tied
    near = [symmetry.expand(choice) for choice in found.dual.choices]
    weighted = whole.weighted(found.dual.prices.weight)
    fused = fuse(weighted, known, near, effort)
    if fused.labels is None:
        return tied
    labels = descend(whole, fused.labels)
    objective, peak = whole.step_s(labels), whole.problem.peak(labels)
    if objective >= found.objective:
        return tied
    bound = found.bound
    if objective <= bound:
        # The bound on plans in which repeated nodes share a choice does not hold here.
        bound = min(_bound(whole, found.dual.prices, labels, effort), objective)
    return replace(
        tied,
        labels=labels,
        objective=objective,
        bound=bound,
        peak=peak,
        lowest_peak=min(found.lowest_peak, peak),
        variables=max(found.variables, fused.variables),
    )


def _bound(whole: Overlap, prices: TimePrices, labels: Labels, effort: Effort) -> float:
    """Return a lower bound on the objective of all choices of all nodes that fit."""
    rounds = min(effort.max_rounds, LONG_ROUNDS)
    brief = replace(effort, max_rounds=rounds, max_fusions=0, deterministic_s=0.0)
    priced = whole.weighted(prices.weight).priced(prices.memory)
    found = solve_pairwise(priced, [labels], brief)
    return found.bound - prices.paid(whole.problem.limit)
