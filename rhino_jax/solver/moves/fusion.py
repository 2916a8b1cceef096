"""Fusion of assignments, under the hard memory limit by CP-SAT.

Source: fusion moves: Lempitsky, Rother, Roth, Blake, PAMI 32 (2010).
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rhino_jax.solver.cpsat import CpSatLimits, count_cells, settle
from rhino_jax.solver.incumbents import Effort
from rhino_jax.solver.memory import build_memory
from rhino_jax.solver.moves.moves import Moves
from rhino_jax.solver.parameters import CPSAT, FUSION
from rhino_jax.solver.problem import Labels, Problem, UnsatisfiedError
from rhino_jax.solver.reduction import Core, core_of
from rhino_jax.utils.cache import Memo


@dataclass(frozen=True, slots=True, eq=False)
class Fused:
    """The result of a fusion.

    Attributes:
      labels: the best assignment that fits; None if none better than `best` was found.
      bound: proved lower bound on the cost of any assignment; minus infinity if not all
        options were allowed.
      variables: number of variables of the last model.
    """

    labels: Labels | None
    bound: float
    variables: int


def fuse(
    problem: Problem, best: Labels | None, others: Sequence[Labels], effort: Effort
) -> Fused:
    """Return the best assignment that fits with options of `best` or of `others`.

    `others` are combined a few at a time; all options are allowed if the problem is
    small.

    Args:
      problem: the problem with its limit.
      best: an assignment that fits; None if none is known.
      others: other assignments, whether they fit or not, the most promising first.
      effort: limits on the search's work.
    """
    labels, bound, variables = None, -math.inf, 0
    most = FUSION.most if effort.proves else FUSION.at_once
    for k in range(0, min(len(others), most), FUSION.at_once):
        some = others[k : k + FUSION.at_once]
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
    cells = sum(e.table.size for e in problem.edges)
    is_whole = effort.deterministic_s > 0 and cells <= CPSAT.most_limited_cells
    if is_whole:
        allowed = [np.arange(len(c)) for c in problem.costs]
    elif len(members) > 1:
        allowed = [np.unique(options) for options in np.array(members).T]
    else:
        return Fused(None, -math.inf, 0)
    profiles = [problem.profile(m) for m in members]
    times = {int(p.argmax()) for p in profiles if p.max(initial=0.0) > problem.limit}
    bound, variables = -math.inf, 0
    for _ in range(FUSION.most_tries):
        core = _reduced(problem, allowed, times)
        try:
            moves = Moves.of(core, build_memory(core, sorted(times)))
        except UnsatisfiedError:
            break
        nodes = range(len(core.costs))
        start = [np.searchsorted(allowed[i], members[0][i]) for i in core.costs]
        if count_cells(moves, nodes) > CPSAT.most_limited_cells:
            break
        moves.divide(unit := moves.unit(problem.objective(members[0])))
        limits = CpSatLimits(
            seconds=max(0.1, min(CPSAT.longest_s, effort.deadline - time.monotonic())),
            deterministic_s=(
                effort.deterministic_s if is_whole else FUSION.limited_deterministic_s
            ),
            near=1e-6 if is_whole else FUSION.limited_near,
            seed=effort.seed,
        )
        found = settle(moves, np.array(start, dtype=int), nodes, limits)
        variables = found.variables
        if is_whole:
            bound = max(bound, found.bound * unit + float(core.constant))
        if found.labels is None:
            break
        chosen = dict(zip(core.costs, found.labels.tolist(), strict=True))
        labels = core.expand(chosen)
        profile = problem.profile(labels)
        if profile.max(initial=0.0) <= problem.limit:
            return Fused(labels, bound, variables)
        if time.monotonic() > effort.deadline:
            break
        times.add(int(profile.argmax()))
    return Fused(None, bound, variables)


def _reduced(problem: Problem, allowed: Sequence[np.ndarray], times: set[int]) -> Core:
    """Return the problem with some options, reduced as far as memory allows.

    Nodes whose memory at `times` does not depend on their option are minimised out.
    """
    memo = Memo()
    core = core_of(problem, memo, allowed)
    varying = {
        node
        for u in core.usages
        if np.ptp(u.usage) and any(u.start <= t < u.stop for t in times)
        for node in u.nodes
    }
    core.reduce(memo, frozenset(varying))
    return core


def fuse_moves(
    moves: Moves, best: np.ndarray, others: Sequence[np.ndarray], limits: CpSatLimits
) -> np.ndarray | None:
    """Return the best assignment with options of `best` or of `others`.

    Args:
      moves: costs and memory of the core.
      best: an assignment within the memory limit.
      others: other assignments, within it or not.
      limits: time limits.
    Returns:
      An assignment within the limit; None if none was found in time, or none differs.
    """
    every = np.array([best, *others])
    differ = np.flatnonzero((every != best).any(axis=0)).tolist()
    if not differ:
        return None
    allowed = {n: np.unique(every[:, n]) for n in differ}
    if not len(moves.memory.largest):
        fused = eliminate(moves, best, allowed)
        if fused is not None:
            return fused
    return settle(moves, best, differ, limits, allowed).labels


def eliminate(
    moves: Moves, best: np.ndarray, allowed: Mapping[int, np.ndarray]
) -> np.ndarray | None:
    """Return the best assignment of some nodes, the others fixed, without memory.

    Nodes are minimised out one by one, whatever the number of their neighbours: a few
    options on a graph that is nearly a tree give small tables.

    Source: Dechter, "Bucket elimination: a unifying framework for reasoning", AI 113
    (1999), with the order of minimum weight.

    Args:
      moves: costs of the core.
      best: an assignment.
      allowed: node → its allowed options.
    Returns:
      The assignment; None if the tables have more than `FUSION.most_cells` cells.
    """
    # Nodes of one option add no cells, but dims, of which NumPy has few.
    best = best.copy()
    for n, mine in allowed.items():
        best[n] = mine[0] if len(mine) == 1 else best[n]
    allowed = {n: mine for n, mine in allowed.items() if len(mine) > 1}
    order = _order({n: len(mine) for n, mine in allowed.items()}, moves)
    if order is None:
        return None
    place = {n: k for k, n in enumerate(order)}
    free, first = np.zeros(len(best), dtype=bool), moves.memory.first
    free[list(allowed)] = True
    totals = moves.totals(moves.costs, best, free)
    # By node, the tables that it is minimised out of: other nodes in order, and cells.
    tables: dict[int, list[tuple[list[int], np.ndarray]]] = {n: [] for n in order}
    for n in order:
        for m, table in moves.neighbours[n]:
            if place.get(m, -1) > place[n]:
                tables[n].append(([m], table[np.ix_(allowed[n], allowed[m])]))
    chosen: list[tuple[int, list[int], np.ndarray]] = []
    for n in order:
        own = totals[first[n] : first[n + 1]][allowed[n]]
        others = sorted(
            {m for some, _ in tables[n] for m in some}, key=lambda m: place[m]
        )
        total = own.reshape(-1, *[1] * len(others))
        for some, table in tables.pop(n):
            sizes = [len(allowed[m]) if m in some else 1 for m in others]
            total = total + table.reshape(len(own), *sizes)
        chosen.append((n, others, total.argmin(axis=0)))
        if others:
            tables[others[0]].append((others[1:], total.min(axis=0)))
    at: dict[int, int] = {}
    for n, others, option in reversed(chosen):
        at[n] = int(option[tuple(at[m] for m in others)])
        best[n] = allowed[n][at[n]]
    return best


def _order(sizes: Mapping[int, int], moves: Moves) -> list[int] | None:
    """Return an order of elimination of nodes, each the one whose table is smallest
    then; None if the tables are too large.

    Args:
      sizes: node → its number of options.
      moves: the core.
    """
    near = {n: {m for m, _ in moves.neighbours[n] if m in sizes} for n in sizes}

    def cells(n: int) -> int:
        return math.prod([sizes[n], *(sizes[m] for m in near[n])])

    queue = [(cells(n), n) for n in near]
    heapq.heapify(queue)
    order, left = list[int](), FUSION.most_cells
    while queue:
        size, n = heapq.heappop(queue)
        if n not in near or size != cells(n):
            continue
        left -= size
        if left < 0:
            return None
        order.append(n)
        around = near.pop(n)
        for m in around:
            near[m] = (near[m] | around) - {n, m}
            heapq.heappush(queue, (cells(m), m))
    return order
