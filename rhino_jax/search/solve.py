"""Solving a problem: pairwise first, with memory where the limit binds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rhino_jax.search.memory_search import search_memory
from rhino_jax.search.pairwise import solve_pairwise
from rhino_jax.search.pool import Effort, Pool, Report
from rhino_jax.search.problem import Labels, Problem


@dataclass(frozen=True, slots=True, eq=False)
class Solution:
    """What the search found.

    Attributes:
      labels: one option per node; None where nothing fits the limit.
      objective: of `labels`.
      bound: proved lower bound.
      peak: memory peak of `labels`.
      smallest_peak: smallest peak of any choice that was met.
      variables: of the last CP-SAT model, 0 where none was needed.
      nodes: number of nodes before and after reduction.
    """

    labels: Labels | None
    objective: float
    bound: float
    peak: float
    smallest_peak: float
    variables: int
    nodes: tuple[int, int]

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
    """Minimise a problem.

    Args:
      problem: what to minimise.
      starts: known choices; the result is never worse than the best that fits.
      effort: limits.
      report: called with new best objectives and bounds.
    """
    pool = Pool(problem, report)
    for start in starts:
        pool.offer(np.asarray(start, dtype=np.int64))
    found = solve_pairwise(problem, pool.members, effort)
    bound, variables = found.bound, found.variables
    report(None, bound)
    nodes = (len(problem.costs), found.nodes)
    if not pool.offer(found.labels):
        priced, tried = search_memory(problem, pool, found.labels, bound, effort)
        bound, variables = max(bound, priced), max(variables, tried)
        report(None, bound)
    return Solution(
        pool.best,
        pool.best_value,
        min(bound, pool.best_value),
        pool.best_peak,
        pool.smallest_peak,
        variables,
        nodes,
    )
