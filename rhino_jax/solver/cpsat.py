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
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from rhino_jax.solver.lookups import sum_live
from rhino_jax.solver.moves.moves import Moves
from rhino_jax.solver.parameters import CPSAT
from rhino_jax.solver.reduction import unique_columns


# OR-tools' `cp_model` imports pandas: 0.5 s, 2 s without bytecode. Most plans need no
# CP-SAT, so that functions import it.
if TYPE_CHECKING:
    from ortools.sat.python.cp_model import CpModel, IntVar


class LiveColumns(NamedTuple):
    """Memory that columns of a model use over a range of rows.

    Attributes:
      start, stop: the rows, without `stop`.
      columns: positions of the columns.
      amounts: memory of each, rounded up to integers.
    """

    start: int
    stop: int
    columns: np.ndarray
    amounts: np.ndarray


@dataclass(slots=True, eq=False)
class MemoryRows:
    """Memory constraints (rows), which are added to the model lazily.

    Attributes:
      columns: variables of options and of pairs.
      held: memory that they use.
      room: memory available to them in every row, rounded down.
      hint: value of every column in the hint.
      added: rows that are in the model.
    """

    columns: list[IntVar]
    held: list[LiveColumns]
    room: np.ndarray
    hint: np.ndarray
    added: set[int] = field(default_factory=set)

    def slack(self, taken: np.ndarray) -> np.ndarray:
        """Return the memory that an assignment leaves available in every row."""
        starts = np.array([h.start for h in self.held], dtype=int)
        stops = np.array([h.stop for h in self.held], dtype=int)
        amounts = [h.amounts[taken[h.columns]].sum() for h in self.held]
        return self.room - sum_live(starts, stops, np.array(amounts), len(self.room))

    def likely(self) -> np.ndarray:
        """Return the rows to begin with: all if few, else the fullest in the hint."""
        size = sum(len(h.columns) * (h.stop - h.start) for h in self.held)
        most = None if size <= CPSAT.most_amounts else CPSAT.rows_at_once
        return np.argsort(self.slack(self.hint), kind="stable")[:most]

    def broken(self, taken: np.ndarray) -> np.ndarray:
        """Return violated rows, the worst first, a limited number at a time."""
        slack = self.slack(taken)
        worst = np.argsort(slack, kind="stable")[: CPSAT.rows_at_once]
        return worst[slack[worst] < 0]

    def add(self, model: CpModel, rows: np.ndarray) -> None:
        from ortools.sat.python import cp_model

        for r in set(rows.tolist()) - self.added:
            self.added.add(r)
            live = [h for h in self.held if h.start <= r < h.stop]
            columns = np.concatenate([h.columns for h in live])
            amounts = np.concatenate([h.amounts for h in live])
            model.add(
                cp_model.LinearExpr.weighted_sum(
                    [self.columns[c] for c in columns], amounts.tolist()
                )
                <= int(self.room[r])
            )


class _MemoryBuilder:
    """Builder of the rows that a model may need.

    Args:
      model: the model; receives variables of pairs.
      moves: costs and memory of the core.
      labels: options of the other nodes, and the hint of these.
      options: free node → its allowed options, ascending.
      x: variables of these options.
    """

    def __init__(
        self,
        model: CpModel,
        moves: Moves,
        labels: np.ndarray,
        options: Mapping[int, np.ndarray],
        x: Mapping[int, Sequence[IntVar]],
    ) -> None:
        self.model, self.moves, self.labels = model, moves, labels
        self.options, self.x = options, x
        self.columns = [var for mine in x.values() for var in mine]
        begins = np.cumsum([0, *map(len, x.values())]).tolist()
        self.place = dict(zip(x, begins, strict=False))
        self.hint = [o == labels[n] for n in x for o in options[n]]
        self.pairs: dict[tuple[int, int, bytes], int] = {}

    def rows(self) -> MemoryRows:
        """Return the rows at times that could overflow.

        Between two changes of the free nodes' memory, the time with the least room
        counts.
        """
        memory, spans = self.moves.memory, self.moves.memory.spans
        entries = sorted({e for n in self.x for e in memory.of_node[n]})
        now = np.zeros(len(spans.start))
        now[entries] = spans.lookups.entries(self.labels, entries)
        room = memory.room - memory.profile(self.labels)
        room += sum_live(spans.start, spans.stop, now, len(room))
        held = [self._held(e) for e in entries]
        bounds = np.unique([b for h in held for b in (h.start, h.stop)])
        rows = bounds[bounds < len(room)].astype(int)
        least = np.minimum.reduceat(room, rows) if len(rows) else room[:0]
        starts = np.searchsorted(bounds, [h.start for h in held])
        stops = np.minimum(np.searchsorted(bounds, [h.stop for h in held]), len(rows))
        largest = np.array([h.amounts.max(initial=0) for h in held])
        most = sum_live(starts, stops, largest, len(rows))
        # The rows that could overflow.
        tight = most > least
        before = np.concatenate([[0], np.cumsum(tight)])
        held = [
            LiveColumns(int(before[start]), int(before[stop]), h.columns, h.amounts)
            for h, start, stop in zip(held, starts, stops, strict=True)
            if before[start] < before[stop]
        ]
        hint = np.array(self.hint, dtype=bool)
        return MemoryRows(self.columns, held, np.floor(least[tight]), hint)

    def _held(self, e: int) -> LiveColumns:
        """Return the memory of an entry by the free nodes' options."""
        spans = self.moves.memory.spans
        i, j = int(spans.lookups.source[e]), int(spans.lookups.target[e])
        table = self.moves.memory.table(e)
        if i == j:
            columns, amounts = self._alone(i, table)
        elif i not in self.x:
            columns, amounts = self._alone(j, table[self.labels[i]])
        elif j not in self.x:
            columns, amounts = self._alone(i, table[:, self.labels[j]])
        else:
            columns, amounts = self._together(i, j, table)
        whole = np.ceil(amounts).astype(np.int64)
        return LiveColumns(int(spans.start[e]), int(spans.stop[e]), columns, whole)

    def _alone(self, n: int, amounts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        amounts = amounts[self.options[n]]
        used = np.flatnonzero(amounts)
        return used + self.place[n], amounts[used]

    def _together(
        self, i: int, j: int, table: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        table = table[np.ix_(self.options[i], self.options[j])]
        columns, amounts = [], []
        for q in range(table.shape[1]):
            for amount in np.unique(table[:, q]):
                if amount > 0:
                    sources = np.flatnonzero(table[:, q] == amount)
                    columns.append(self._both(i, j, q, sources))
                    amounts.append(amount)
        return np.array(columns, dtype=int), np.array(amounts)

    def _both(self, i: int, j: int, q: int, sources: np.ndarray) -> int:
        """Return the column that is 1 if j takes option q, and i one of `sources`."""
        column = self.place[j] + q
        if len(sources) == len(self.x[i]):
            return column
        key = i, column, sources.tobytes()
        if key not in self.pairs:
            own = [self.place[i] + p for p in sources.tolist()]
            var = self.model.new_bool_var("")
            self.model.add(
                var >= self.columns[column] + sum(self.columns[c] for c in own) - 1
            )
            self.pairs[key] = len(self.columns)
            self.columns.append(var)
            self.hint.append(self.hint[column] and any(self.hint[c] for c in own))
            self.model.add_hint(var, int(self.hint[-1]))
        return self.pairs[key]


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
    from ortools.sat.python import cp_model

    begun = time.monotonic()
    model = cp_model.CpModel()
    builder = _CpSatBuilder(model, moves, labels, sorted(nodes), allowed)
    builder.add_nodes()
    builder.add_edges()
    model.minimize(cp_model.LinearExpr.weighted_sum(builder.terms, builder.weights))
    rows = _MemoryBuilder(model, moves, labels, builder.options, builder.x).rows()
    rows.add(model, rows.likely())
    bound, variables = -math.inf, len(model.proto.variables)
    while True:
        solver = cp_model.CpSolver()
        given = solver.parameters
        given.num_workers = limits.workers
        given.random_seed = limits.seed
        left = limits.seconds - (time.monotonic() - begun)
        given.max_time_in_seconds = max(left, 0.01)
        given.max_deterministic_time = limits.deterministic_s
        given.relative_gap_limit = limits.near
        given.linearization_level = 2
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
        model: CpModel,
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
        self.model = model
        self.x: dict[int, list[IntVar]] = {}
        self.terms: list[IntVar] = []
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
        by_row: list[list[IntVar]] = [[] for _ in range(cells.shape[0])]
        by_column: list[list[IntVar]] = [[] for _ in range(cells.shape[1])]
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

    def _charge(self, x: IntVar, cost: float) -> None:
        if weight := round(cost):
            self.terms.append(x)
            self.weights.append(weight)
