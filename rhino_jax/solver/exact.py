"""CP-SAT on some nodes of a network, the others as they are, memory hard.

Variables   x[n, o]       node n takes option o
            e[nm, p, q]   the edge of two free nodes runs from class p to class q
Subject to  Σ_o x[n, o] = 1
            Σ_q e[nm, p, q] = Σ_{o in p} x[n, o], and likewise for q
            Σ memory of x ≤ what the other nodes leave, at times that could overflow
Minimise    Σ cost·x + Σ table·e, in the instance's own whole numbers

A class is a set of options that the edge cannot tell apart. The equalities are the
local polytope (Werner, PAMI 29 (2007), section 3.1).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from ortools.sat.python import cp_model

from rhino_jax.solver.moves import Moves


MOST_COMPARED_ROWS = 4000
"""More rows of memory than this are not compared with each other: that takes the
square of their number."""


@dataclass(frozen=True, slots=True, eq=False)
class Settled:
    """What CP-SAT found.

    Attributes:
      labels: the choice, of all nodes; None where it found none.
      bound: proved lower bound on the objective's free part.
      is_optimal: no choice of the free nodes is better.
    """

    labels: np.ndarray | None
    bound: float
    is_optimal: bool


def count_cells(moves: Moves, nodes: Sequence[int]) -> int:
    """How many edge variables a model of these nodes has at most."""
    free = set(nodes)
    return sum(
        table.size for n in free for m, table in moves.neighbours[n] if n < m in free
    )


def settle(
    moves: Moves,
    labels: np.ndarray,
    nodes: Sequence[int],
    *,
    seconds: float,
    workers: int,
    seed: int = 0,
) -> Settled:
    """The best options of some nodes beside the choice of the others.

    Args:
      moves: the network's costs.
      labels: a choice within the memory limit; the hint.
      nodes: those that may change.
      seconds: wall-clock limit.
      workers: of CP-SAT.
      seed: of CP-SAT.
    """
    builder = _Builder(moves, labels, sorted(nodes))
    builder.add_nodes()
    builder.add_edges()
    builder.add_memory()
    model = builder.model
    model.minimize(cp_model.LinearExpr.weighted_sum(builder.terms, builder.weights))
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = workers
    solver.parameters.random_seed = seed
    solver.parameters.max_time_in_seconds = max(seconds, 0.01)
    solver.parameters.linearization_level = 2
    status = solver.solve(model)
    bound = solver.best_objective_bound
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Settled(None, bound, status == cp_model.INFEASIBLE)
    found = labels.copy()
    for n, variables in builder.x.items():
        found[n] = next(o for o, x in enumerate(variables) if solver.value(x))
    return Settled(found, bound, status == cp_model.OPTIMAL)


class _Builder:
    def __init__(self, moves: Moves, labels: np.ndarray, nodes: list[int]) -> None:
        self.moves, self.labels, self.nodes = moves, labels, nodes
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
            costs = totals[first[n] : first[n + 1]]
            self.x[n] = [self.model.new_bool_var("") for _ in costs]
            self.model.add_exactly_one(self.x[n])
            for o, (x, cost) in enumerate(zip(self.x[n], costs, strict=True)):
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
        rows, of_row = np.unique(table, axis=0, return_inverse=True)
        cells, of_column = np.unique(rows, axis=1, return_inverse=True)
        of_row, of_column = of_row.ravel(), of_column.ravel()
        hint = of_row[self.labels[n]], of_column[self.labels[m]]
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
                members = [self.x[node][o] for o in np.flatnonzero(of == k)]
                self.model.add(sum(line) == sum(members))

    def _charge(self, x: cp_model.IntVar, cost: float) -> None:
        if weight := round(cost):
            self.terms.append(x)
            self.weights.append(weight)

    def add_memory(self) -> None:
        columns = [x for n in self.nodes for x in self.x[n]]
        for row, room in zip(*self._memory_rows(len(columns)), strict=True):
            used = np.flatnonzero(row)
            self.model.add(
                cp_model.LinearExpr.weighted_sum(
                    [columns[c] for c in used], [math.ceil(row[c]) for c in used]
                )
                <= math.floor(room)
            )

    def _memory_rows(self, num_columns: int) -> tuple[np.ndarray, np.ndarray]:
        """Memory of every option of the free nodes, and the room for it, at times
        that could overflow; between two of their changes, the one with least room."""
        memory = self.moves.memory
        place = np.full(len(self.labels), -1)
        sizes = [len(self.x[n]) for n in self.nodes]
        place[self.nodes] = np.cumsum([0, *sizes[:-1]])
        entries = np.flatnonzero(place[memory.node] >= 0)
        if not len(entries):
            return np.zeros((0, num_columns)), np.zeros(0)
        now = memory.amounts[memory.cells[:-1] + self.labels[memory.node]][entries]
        largest = np.maximum.reduceat(memory.amounts, memory.cells[:-1])[entries]
        starts, stops = memory.start[entries], memory.stop[entries]
        room = memory.room - memory.profile(self.labels)
        room += _sums(starts, stops, now, memory.num_times)
        bounds = np.unique(np.concatenate([starts, stops]))
        spans = bounds[bounds < memory.num_times]
        least = np.minimum.reduceat(room, spans)
        starts, stops = np.searchsorted(bounds, [starts, stops])
        tight = _sums(starts, stops, largest, len(spans)) > least
        rows = np.zeros((int(tight.sum()), num_columns))
        before = np.concatenate([[0], np.cumsum(tight)])
        for e, start, stop in zip(entries, starts, stops, strict=True):
            begin, end = before[start], before[min(stop, len(spans))]
            if begin < end:
                amounts = memory.amounts[memory.cells[e] : memory.cells[e + 1]]
                at = place[memory.node[e]]
                rows[begin:end, at : at + len(amounts)] += amounts
        return _undominated(rows, least[tight])


def _sums(
    starts: np.ndarray, stops: np.ndarray, amounts: np.ndarray, length: int
) -> np.ndarray:
    change = np.bincount(starts, amounts, length + 1)
    change -= np.bincount(stops, amounts, length + 1)
    return np.cumsum(change)[:length]


def _undominated(rows: np.ndarray, room: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Without the rows that another implies: at least as full, with no more room."""
    both = np.unique(np.concatenate([rows, -room[:, None]], axis=1), axis=0)
    if len(both) <= MOST_COMPARED_ROWS:
        both = both[np.argsort(-both.sum(axis=1), kind="stable")]
        kept = np.empty_like(both)
        count = 0
        for row in both:
            if not (kept[:count] >= row).all(axis=1).any():
                kept[count] = row
                count += 1
        both = kept[:count]
    return both[:, :-1], -both[:, -1]
