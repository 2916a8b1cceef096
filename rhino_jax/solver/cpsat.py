"""The CP-SAT model of some nodes of a core, the others fixed, with hard memory.

Variables   x[n, o]       node n takes option o
            e[nm, p, q]   the edge of two free nodes runs from group p to group q
Subject to  Σ_o x[n, o] = 1
            Σ_q e[nm, p, q] = Σ_{o in p} x[n, o], and likewise for q
            Σ memory of x ≤ memory left by the other nodes, at times that need it
            x[n, o] + Σ_{p} x[m, p] - 1 ≤ a   a pair's memory, used if a = 1
Minimise    Σ cost·x + Σ table·e, in whole units of the costs (`Moves.divide`)

A group is a set of options with equal costs on the edge. The equalities are the
local polytope (Werner, PAMI 29 (2007), section 3.1).
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from ortools.sat.python import cp_model

from rhino_jax.solver.cpsat_memory import memory_rows
from rhino_jax.solver.moves.moves import Moves
from rhino_jax.solver.reduction import unique_columns


@dataclass(frozen=True, slots=True, kw_only=True)
class CpSatLimits:
    """Limits and parameters of a CP-SAT run.

    Attributes:
      seconds: wall-clock limit, in seconds.
      deterministic_s: limit on CP-SAT's own count of work, equal on every machine with
        one worker.
      near: relative gap at which CP-SAT stops.
      workers: number of threads.
      seed: random seed.
    """

    seconds: float
    deterministic_s: float = math.inf
    near: float = 0.0
    workers: int = 1
    seed: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Settled:
    """The result of a CP-SAT run.

    Attributes:
      labels: assignment of all nodes; None if none was found.
      bound: proved lower bound on the free nodes' part of the objective.
      is_optimal: whether `labels` is proved optimal over the free nodes; without
        `labels`, whether infeasibility is proved.
      variables: number of the model's variables.
    """

    labels: np.ndarray | None
    bound: float
    is_optimal: bool
    variables: int


def count_cells(moves: Moves, nodes: Sequence[int]) -> int:
    """Return an upper bound on the edge variables of a model of these nodes."""
    free = set(nodes)
    return sum(
        table.size for n in free for m, table in moves.neighbours[n] if n < m in free
    )


def settle(
    moves: Moves,
    labels: np.ndarray,
    nodes: Sequence[int],
    limits: CpSatLimits,
    allowed: Mapping[int, np.ndarray] | None = None,
) -> Settled:
    """Optimise some nodes, given the options of the others.

    Args:
      moves: costs of the core.
      labels: an assignment within the memory limit; used as the hint.
      nodes: the free nodes.
      limits: time limits.
      allowed: node → its allowed options, ascending; None: all.
    """
    begun = time.monotonic()
    builder = _CpSatBuilder(moves, labels, sorted(nodes), allowed)
    builder.add_nodes()
    builder.add_edges()
    model = builder.model
    model.minimize(cp_model.LinearExpr.weighted_sum(builder.terms, builder.weights))
    rows = memory_rows(model, moves, labels, builder.options, builder.x)
    rows.add(model, rows.likely())
    bound, variables = -math.inf, len(model.proto.variables)
    while True:
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = limits.workers
        solver.parameters.random_seed = limits.seed
        left = limits.seconds - (time.monotonic() - begun)
        solver.parameters.max_time_in_seconds = max(left, 0.01)
        solver.parameters.max_deterministic_time = limits.deterministic_s
        solver.parameters.relative_gap_limit = limits.near
        solver.parameters.linearization_level = 2
        status = solver.solve(model)
        if status != cp_model.MODEL_INVALID:  # costs beyond 64 bits
            bound = max(bound, solver.best_objective_bound)
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            is_proved = status == cp_model.INFEASIBLE
            return Settled(None, bound, is_proved, variables)
        taken = np.array([solver.value(x) for x in rows.columns], dtype=bool)
        broken = rows.broken(taken)
        if not len(broken):
            break
        if time.monotonic() - begun > limits.seconds:
            return Settled(None, bound, False, variables)
        rows.add(model, broken)
    found = labels.copy()
    for n, mine in builder.x.items():
        at = next(k for k, x in enumerate(mine) if solver.value(x))
        found[n] = builder.options[n][at]
    return Settled(found, bound, status == cp_model.OPTIMAL, variables)


class _CpSatBuilder:
    def __init__(
        self,
        moves: Moves,
        labels: np.ndarray,
        nodes: list[int],
        allowed: Mapping[int, np.ndarray] | None,
    ) -> None:
        self.moves, self.labels, self.nodes = moves, labels, nodes
        sizes = np.diff(moves.memory.first)
        self.options = {
            n: np.arange(sizes[n]) if allowed is None else allowed[n] for n in nodes
        }
        self.model = cp_model.CpModel()
        self.x: dict[int, list[cp_model.IntVar]] = {}
        self.terms: list[cp_model.IntVar] = []
        self.weights: list[int] = []

    def add_nodes(self) -> None:
        free = np.zeros(len(self.labels), dtype=bool)
        free[self.nodes] = True
        first = self.moves.memory.first
        totals = self.moves.totals(self.moves.costs, self.labels, free)
        for n in self.nodes:
            costs = totals[first[n] : first[n + 1]][self.options[n]]
            self.x[n] = [self.model.new_bool_var("") for _ in costs]
            self.model.add_exactly_one(self.x[n])
            for o, x, cost in zip(self.options[n], self.x[n], costs, strict=True):
                self.model.add_hint(x, int(self.labels[n] == o))
                if cost >= self.moves.forbidden:
                    self.model.add(x == 0)
                else:
                    self._charge(x, cost)

    def add_edges(self) -> None:
        for n in self.nodes:
            for m, table in self.moves.neighbours[n]:
                if n < m and m in self.x:
                    self._add_edge(n, m, table)

    def _add_edge(self, n: int, m: int, table: np.ndarray) -> None:
        table = table[self.options[n]][:, self.options[m]]
        rows, of_row = unique_columns(table.T)
        cells, of_column = unique_columns(rows.T)
        hint = (
            of_row[int(np.searchsorted(self.options[n], self.labels[n]))],
            of_column[int(np.searchsorted(self.options[m], self.labels[m]))],
        )
        by_row: list[list[cp_model.IntVar]] = [[] for _ in range(cells.shape[0])]
        by_column: list[list[cp_model.IntVar]] = [[] for _ in range(cells.shape[1])]
        for (p, q), cost in np.ndenumerate(cells):
            if cost >= self.moves.forbidden:
                continue
            e = self.model.new_bool_var("")
            self.model.add_hint(e, int((p, q) == hint))
            self._charge(e, float(cost))
            by_row[p].append(e)
            by_column[q].append(e)
        for node, of, lines in ((n, of_row, by_row), (m, of_column, by_column)):
            for k, line in enumerate(lines):
                members = [
                    x for x, of_x in zip(self.x[node], of, strict=True) if of_x == k
                ]
                self.model.add(sum(line) == sum(members))

    def _charge(self, x: cp_model.IntVar, cost: float) -> None:
        if weight := round(cost):
            self.terms.append(x)
            self.weights.append(weight)
