"""Choices merged under the hard memory limit: CP-SAT takes of each what fits best."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rhino_jax.optimize.cpsat import count_cells, solve_core
from rhino_jax.optimize.incumbents import MAX_MODEL_CELLS, Effort
from rhino_jax.optimize.presolve.reduction import reduce
from rhino_jax.optimize.problem import Labels, Problem
from rhino_jax.optimize.restriction import Restriction


FUSED_AT_ONCE, MOST_FUSED_IN_ALL = 3, 6
"""Choices that are merged with the best at once, and in all: of eight at once CP-SAT
finds less in the same time."""

MOST_TRIES = 12
"""Models, each with the time more at which the choice before it overflowed."""


FUSION_DETERMINISTIC_S, NEAR = 0.5, 1e-3
"""CP-SAT's deterministic limit, and the share of the objective at which it stops, where
it takes some options only: three times as much gains a GPT of eight layers nothing."""


@dataclass(frozen=True, slots=True, eq=False)
class Fused:
    """Attributes:
    labels: the best choice that fits; None where none better than `best` was found.
    bound: proved lower bound on what any choice costs, minus infinity where not all
        options were allowed.
    variables: of the last model.
    """

    labels: Labels | None
    bound: float
    variables: int


def fuse(
    problem: Problem, best: Labels | None, others: Sequence[Labels], effort: Effort
) -> Fused:
    """The best choice that fits whose every option is that of `best` or of one of
    `others`, a few of them at a time; of all options where the problem is small.

    Args:
      problem: with its limit.
      best: a choice that fits, or None where none is known.
      others: other choices, whether they fit or not, the most promising first.
      effort: limits.
    """
    labels, bound, variables = None, -math.inf, 0
    most = MOST_FUSED_IN_ALL if effort.proves else FUSED_AT_ONCE
    for k in range(0, min(len(others), most), FUSED_AT_ONCE):
        some = others[k : k + FUSED_AT_ONCE]
        fused = _fuse_all(problem, best, some, effort)
        bound, variables = max(bound, fused.bound), max(variables, fused.variables)
        if fused.labels is not None:
            best = labels = fused.labels
        if math.isfinite(bound) or time.monotonic() > effort.deadline:
            break
    return Fused(labels, bound, variables)


def _fuse_all(
    problem: Problem, best: Labels | None, others: Sequence[Labels], effort: Effort
) -> Fused:
    members = [*others] if best is None else [best, *others]
    size = len(problem.costs)
    cells = sum(e.table.size for e in problem.edges)
    is_whole = effort.deterministic_s > 0 and cells <= MAX_MODEL_CELLS
    if is_whole:
        allowed = [np.arange(len(c)) for c in problem.costs]
    elif len(members) > 1:
        every = np.array(members)
        allowed = [np.unique(every[:, i]) for i in range(size)]
    else:
        return Fused(None, -math.inf, 0)
    left = Restriction.of(problem.costs, allowed)
    small = problem.restricted(left)
    profiles = [problem.profile(m) for m in members]
    times = {int(p.argmax()) for p in profiles if p.max(initial=0.0) > problem.limit}
    upper = math.inf if best is None else problem.objective(best)
    hints = None if best is None else left.contract(best)
    bound, variables = -math.inf, 0
    deterministic_s, near = FUSION_DETERMINISTIC_S, NEAR
    if is_whole:
        deterministic_s, near = effort.deterministic_s, 1e-6
    for _ in range(MOST_TRIES):
        core = reduce(small, _memory_nodes(small, times))
        options = {i: np.arange(len(c)) for i, c in core.costs.items()}
        if count_cells(core, options) > MAX_MODEL_CELLS:
            break
        answer = solve_core(
            core,
            options,
            {} if hints is None else {i: int(hints[i]) for i in core.costs},
            upper,
            memory=small,
            times=tuple(sorted(times)),
            deterministic_s=deterministic_s,
            wall_s=max(0.1, min(60.0, effort.deadline - time.monotonic())),
            near=near,
            seed=effort.seed,
        )
        variables = answer.variables
        if is_whole:
            bound = max(bound, answer.bound + float(core.constant))
        if answer.labels is None:
            break
        labels = left.expand(core.expand(answer.labels))
        profile = problem.profile(labels)
        if profile.max(initial=0.0) <= problem.limit:
            return Fused(labels, bound, variables)
        if time.monotonic() > effort.deadline:
            break
        times.add(int(profile.argmax()))
    return Fused(None, bound, variables)


def _memory_nodes(problem: Problem, times: set[int]) -> frozenset[int]:
    """Nodes whose choice changes memory at one of the times."""
    found: set[int] = set()
    for u in problem.node_usages:
        if np.ptp(u.usage) and any(u.start <= t < u.stop for t in times):
            found.add(u.node)
    for e in problem.edge_usages:
        if e.usage.any() and any(e.start <= t < e.stop for t in times):
            found |= {e.source, e.target}
    return frozenset(found)
