"""Assignments with little memory, at any cost."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from rhino_jax.solver.incumbents import Effort
from rhino_jax.solver.pairwise import solve_pairwise
from rhino_jax.solver.problem import EdgeUsage, Labels, NodeUsage, Problem


NEARLY = 1e-3
"""Relative gap between a peak and its lower bound that is good enough."""

TARGETS = (1.0, 0.9, 0.5, 0.0)
"""Targets for single-node moves, as shares of the limit, tried in turn until the limit
is met: lower ones also free memory at times below the limit, which others may need."""

MAX_PASSES = 8
"""Passes over all nodes, each moved to the option with the least excess memory."""


def least_possible(problem: Problem, parts: float = math.inf) -> float:
    """Return a lower bound on the peak: the sum of all minima at the fullest time.

    Args:
      problem: the problem.
      parts: also allow options that hold one of so many parts of what is held most.
    """
    change = np.zeros(problem.end + 1)
    for u in problem.usages:
        least = u.usage.min()
        if math.isfinite(parts):
            least = min(least, u.usage.max() / parts)
        change[u.start] += least
        change[u.stop] -= least
    return float(np.cumsum(change)[: problem.end].max(initial=0.0))


def smallest_peak(problem: Problem) -> Labels:
    """Return the assignment with the smallest peak found; stop once the limit holds."""
    return min(low_peaks(problem), key=problem.peak)


def minimum_peak(problem: Problem) -> Labels:
    """Return the assignment with the smallest peak found, independent of the limit."""
    return smallest_peak(problem.within(least_possible(problem)))


def low_peaks(problem: Problem, rounds: int = 16) -> list[Labels]:
    """Return assignments each of which is low at times where those before are high.

    Memory is minimised instead of cost, weighted by time, with weights that grow where
    memory is high; if that is not enough, nodes are moved one by one. Stops once the
    limit is met.

    Source: Arora, Hazan, Kale, "The multiplicative weights update method",
    Theory of Computing 8 (2012), section 3.
    """
    only_memory = replace(problem, costs=[c * 0.0 for c in problem.costs], edges=[])
    effort = Effort(max_rounds=4, deterministic_s=0.0, max_fusions=0)
    enough = max(problem.limit, (1 + NEARLY) * least_possible(problem))
    weights = np.full(problem.end, 1.0 / problem.end)
    best, stalled = math.inf, 0
    met: list[Labels] = []
    for _ in range(rounds):
        prices = dict(enumerate(weights.tolist()))
        met.append(solve_pairwise(only_memory.priced(prices), [], effort).labels)
        profile = problem.profile(met[-1])
        peak = float(profile.max(initial=0.0))
        stalled = 0 if peak < 0.99 * best else stalled + 1
        best = min(best, peak)
        if best <= enough or stalled >= 5:
            break
        weights = weights * np.exp(6 * (profile / peak - 1))
        weights = np.maximum(weights / weights.sum(), 1e-3 / problem.end)
    start = min(met, key=problem.peak)
    for share in TARGETS:
        if min(map(problem.peak, met)) <= enough:
            break
        met.append(_move_apart(problem, start, share * problem.limit))
    return met


def _move_apart(problem: Problem, start: Labels, target: float) -> Labels:
    """Move single nodes while that brings memory closer to the target.

    With weights, equivalent nodes get equal options, and then overflow together.
    """
    uses: list[list[NodeUsage | EdgeUsage]] = [[] for _ in problem.costs]
    for u in problem.usages:
        if np.ptp(u.usage):
            for node in set(u.nodes):
                uses[node].append(u)
    labels = start.copy()
    over = problem.profile(labels) - target
    for _ in range(MAX_PASSES):
        has_moved = False
        for node, mine in enumerate(uses):
            if not any(over[u.start : u.stop].max(initial=0.0) > 0 for u in mine):
                continue
            begin, end = min(u.start for u in mine), max(u.stop for u in mine)
            held = np.zeros((len(problem.costs[node]), end - begin))
            for u in mine:
                held[:, u.start - begin : u.stop - begin] += _by_option(
                    u, node, labels
                )[:, None]
            after = over[begin:end] + (held - held[labels[node]])
            excess = np.maximum(after, 0.0).sum(axis=1)
            option = int(excess.argmin())
            if excess[option] < excess[labels[node]] * (1 - 1e-9):
                over[begin:end] = after[option]
                labels[node], has_moved = option, True
        if not has_moved or over.max(initial=0.0) <= 0:
            break
    return labels


def _by_option(use: NodeUsage | EdgeUsage, node: int, labels: Labels) -> np.ndarray:
    """Return the memory with each option of the node, its neighbours fixed."""
    if isinstance(use, NodeUsage):
        return use.usage
    if use.source == use.target:
        return np.diagonal(use.usage)
    if use.source == node:
        return use.usage[:, labels[use.target]]
    return use.usage[labels[use.source]]
