"""The search where the memory limit binds.

Memory at the times that overflow gets a price (a Lagrangian relaxation, whose
optimum less the priced limit is a lower bound). The choices met on the way form a
pool, and CP-SAT puts their best parts together under the hard limit.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace

import numpy as np

from rhino_jax.search.cpsat import count_cells, solve_core
from rhino_jax.search.pairwise import solve_pairwise
from rhino_jax.search.pool import MAX_MODEL_CELLS, Effort, Pool
from rhino_jax.search.problem import Labels, Problem
from rhino_jax.search.reduction import reduce


def search_memory(
    problem: Problem, pool: Pool, labels: Labels, bound: float, effort: Effort
) -> tuple[float, int]:
    """Price the times that overflow, then merge what was met. Returns the best
    bound and the number of CP-SAT variables."""
    least = smallest_peak(problem)
    if not pool.offer(least):
        return bound, 0
    light = replace(
        effort,
        deterministic_s=0.0,
        max_rounds=max(8, effort.max_rounds // 3),
        max_fusions=1,
    )
    base = max(problem.objective(labels), 1e-12) / max(problem.limit, 1.0)
    prices: dict[int, float] = {}
    profile = problem.profile(labels)
    proving = prices
    scale = 0.05 * base
    low, high = 0.0, math.inf
    for _ in range(effort.max_prices):
        peak_time = int(profile.argmax())
        if profile[peak_time] > problem.limit and peak_time not in prices:
            prices[peak_time] = 1.0
            high = math.inf
        now = {t: w * scale / sum(prices.values()) for t, w in prices.items()}
        found = solve_pairwise(problem.priced(now), pool.members[-3:], light)
        labels = found.labels
        paid = sum(now.values()) * problem.limit
        if found.bound - paid > bound:
            bound, proving = found.bound - paid, now
        fits = pool.offer(labels)
        profile = problem.profile(labels)
        over = {t: float(profile[t]) / problem.limit for t in prices}
        if fits:
            high = scale
        else:
            low = scale
        total = sum(prices.values())
        prices = {
            t: max(w / total * min(max(over[t], 0.5), 2.0), 1e-3)
            for t, w in prices.items()
        }
        scale = math.sqrt(max(low, high / 16) * high) if high < math.inf else scale * 4
        if high < math.inf and low > 0 and high / low < 1.05:
            break
        if time.monotonic() > effort.deadline:
            break
    if proving and effort.proves:
        # The same prices again, with all rounds of messages.
        found = solve_pairwise(problem.priced(proving), pool.members[-3:], effort)
        paid = sum(proving.values()) * problem.limit
        bound = max(bound, found.bound - paid)
        pool.offer(found.labels)
    pool.report(None, bound)
    if not effort.deterministic_s:
        return bound, 0
    merged, variables = _merge(problem, pool, effort)
    return max(bound, merged), variables


def _merge(problem: Problem, pool: Pool, effort: Effort) -> tuple[float, int]:
    """Let CP-SAT choose under the hard limit: among all options where the model is
    small enough, else among those of the choices in the pool. Returns a bound
    (minus infinity where the pool restricts it) and the number of variables."""
    variables, bound = 0, -math.inf
    times: set[int] = set()
    for member in pool.members:
        profile = problem.profile(member)
        if profile.max(initial=0.0) > problem.limit:
            times.add(int(profile.argmax()))
    members = sorted(pool.members, key=problem.objective)[:8]
    if pool.best is not None:
        members.append(pool.best)
    allowed = [np.arange(len(c)) for c in problem.costs]
    is_whole = True
    for _ in range(12):
        small = problem.restricted(allowed)
        core = reduce(small, _memory_nodes(small, times))
        options = {i: np.arange(len(c)) for i, c in core.costs.items()}
        if count_cells(core, options) > MAX_MODEL_CELLS:
            if not is_whole:
                members = members[: len(members) // 2]
            if len(members) < 2:
                break
            is_whole = False
            allowed = [
                np.unique([int(m[i]) for m in members])
                for i in range(len(problem.costs))
            ]
            continue
        hint = {}
        if pool.best is not None:
            hint = {
                i: int(np.searchsorted(allowed[i], pool.best[i]))
                for i in core.costs
                if pool.best[i] in allowed[i]
            }
        answer = solve_core(
            core,
            options,
            hint,
            pool.best_value,
            memory=small,
            times=tuple(sorted(times)),
            deterministic_s=effort.deterministic_s,
            wall_s=max(0.1, min(60.0, effort.deadline - time.monotonic())),
            seed=effort.seed,
        )
        variables = answer.variables
        if is_whole:
            rest = sum(float(c.min()) for _, c, around in core.removed if not around)
            bound = max(bound, answer.bound + rest)
        if answer.labels is None:
            break
        local = core.expand(answer.labels)
        labels = np.array([allowed[i][k] for i, k in enumerate(local)])
        if pool.offer(labels) or time.monotonic() > effort.deadline:
            break
        times.add(int(problem.profile(labels).argmax()))
    return bound, variables


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


def smallest_peak(problem: Problem, rounds: int = 16) -> Labels:
    """The choice with the smallest memory peak that is found.

    Memory is minimised in place of cost, at times whose weights grow where memory
    is high. Stops as soon as the limit is met.

    Source: Arora, Hazan, Kale, "The multiplicative weights update method",
    Theory of Computing 8 (2012), section 3.
    """
    only_memory = Problem(
        [c * 0.0 for c in problem.costs],
        [],
        problem.node_usages,
        problem.edge_usages,
        problem.limit,
        problem.end,
    )
    effort = Effort(max_rounds=4, deterministic_s=0.0, max_fusions=0)
    weights = np.full(problem.end, 1.0 / problem.end)
    best, best_labels, stalled = math.inf, None, 0
    for _ in range(rounds):
        prices = dict(enumerate(weights.tolist()))
        labels = solve_pairwise(only_memory.priced(prices), [], effort).labels
        profile = problem.profile(labels)
        peak = float(profile.max(initial=0.0))
        stalled = 0 if peak < 0.99 * best else stalled + 1
        if peak < best:
            best, best_labels = peak, labels
        if peak <= problem.limit or stalled >= 5:
            break
        weights = weights * np.exp(6 * (profile / peak - 1))
        weights = np.maximum(weights / weights.sum(), 1e-3 / problem.end)
    assert best_labels is not None
    return best_labels
