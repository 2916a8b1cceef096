"""Memory constraints of a CP-SAT model, over variables of options and of pairs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from ortools.sat.python import cp_model

from rhino_jax.solver.lookups import sum_live
from rhino_jax.solver.moves.moves import Moves
from rhino_jax.solver.parameters import CPSAT


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

    columns: list[cp_model.IntVar]
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

    def add(self, model: cp_model.CpModel, rows: np.ndarray) -> None:
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


def memory_rows(
    model: cp_model.CpModel,
    moves: Moves,
    labels: np.ndarray,
    options: Mapping[int, np.ndarray],
    x: Mapping[int, Sequence[cp_model.IntVar]],
) -> MemoryRows:
    """Return the rows that a model may need.

    Args:
      model: the model; receives variables of pairs.
      moves: costs and memory of the core.
      labels: options of the other nodes, and the hint of these.
      options: free node → its allowed options, ascending.
      x: variables of these options.
    """
    return _MemoryBuilder(model, moves, labels, options, x).rows()


class _MemoryBuilder:
    def __init__(
        self,
        model: cp_model.CpModel,
        moves: Moves,
        labels: np.ndarray,
        options: Mapping[int, np.ndarray],
        x: Mapping[int, Sequence[cp_model.IntVar]],
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
