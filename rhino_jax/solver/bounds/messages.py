"""Message passing: every neighbour's minimum cost for each option of a node.

Sequential tree-reweighted message passing (Kolmogorov, PAMI 28 (2006), section 5).
Messages remain good starts while the costs of options change, as with multipliers of
memory.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np

from rhino_jax.solver.moves.forests import DistinctTable
from rhino_jax.solver.moves.moves import Moves
from rhino_jax.solver.parameters import MESSAGES


class _Turn(NamedTuple):
    """The data of one node's update.

    Attributes:
      ahead: rows of the messages to the node from neighbours that are updated later.
      num_ahead, num_behind: number of neighbours updated later, and of the others.
      large: (row among those ahead, table, positions of the outgoing message) of later
        neighbours with a table that has many repeated rows and columns.
      rows: rows among those ahead of all other later neighbours.
      tables: table to each of these, [options, neighbour's options].
      reach: scratch memory: one row per option, the tables concatenated.
      parts: columns of `reach` of each table.
      starts, of_part: first column of each table in `reach`; and the table of every
        column.
      into: positions of the outgoing messages, in the order of the columns.
      behind: (neighbour, table) of those updated earlier.
    """

    ahead: slice
    num_ahead: int
    num_behind: int
    large: list[tuple[int, DistinctTable, slice]]
    rows: list[int]
    tables: list[np.ndarray]
    reach: np.ndarray
    parts: list[np.ndarray]
    starts: np.ndarray
    of_part: np.ndarray
    into: np.ndarray
    behind: list[tuple[int, np.ndarray]]


class SavedMessages(NamedTuple):
    """Messages without the tables of their core, to start from later.

    Attributes:
      values: all messages.
      shapes: node → (neighbours, options).
    """

    values: np.ndarray
    shapes: list[tuple[int, ...]]


class Messages:
    """The messages over the edges of a core.

    Args:
      moves: costs and tables of the core.
    """

    def __init__(self, moves: Moves) -> None:
        self._first = moves.memory.first.tolist()
        near = [sorted(around, key=lambda e: e[0]) for around in moves.neighbours]
        sizes = np.diff(moves.memory.first)
        blocks = np.array([len(n) for n in near], dtype=int) * sizes
        begins = np.concatenate([[0], np.cumsum(blocks)]).astype(int)
        # All messages; those to one node are adjacent, one per row.
        self._all = np.zeros(begins[-1])
        self._to = [
            self._all[begins[n] : begins[n + 1]].reshape(len(around), sizes[n])
            for n, around in enumerate(near)
        ]
        place = {
            (n, m): begins[n] + row * sizes[n]
            for n, around in enumerate(near)
            for row, (m, _) in enumerate(around)
        }
        cells = [sum(t.size for _, t in around) for around in near]
        scratch = np.empty(max(cells, default=0))

        def turn(n: int, way: int) -> _Turn:
            middle = sum(m < n for m, _ in near[n])
            low, high = near[n][:middle], near[n][middle:]
            later, behind = (low, high) if way else (high, low)
            known = [moves.tables.distinct(n, m) for m, _ in later]
            large = [
                (k, table, slice(place[m, n], place[m, n] + sizes[m]))
                for k, ((m, _), table) in enumerate(zip(later, known, strict=True))
                if table is not None
            ]
            rows = [k for k, table in enumerate(known) if table is None]
            ahead = [later[k] for k in rows]
            widths = [sizes[m] for m, _ in ahead]
            ends = np.cumsum([0, *widths])
            reach = scratch[: sizes[n] * ends[-1]].reshape(sizes[n], ends[-1])
            parts = [reach[:, a:b] for a, b in itertools.pairwise(ends)]
            into = [np.arange(sizes[m]) + place[m, n] for m, _ in ahead]
            return _Turn(
                slice(0, middle) if way else slice(middle, len(near[n])),
                len(later),
                len(behind),
                large,
                rows,
                [np.ascontiguousarray(t) for _, t in ahead],
                reach,
                parts,
                ends[:-1],
                np.repeat(np.arange(len(ahead)), widths),
                np.concatenate([*into, np.zeros(0, dtype=int)]),
                behind,
            )

        self._turns = [[turn(n, way) for n in range(len(near))] for way in (0, 1)]
        self._costs: np.ndarray | None = None
        self._before: np.ndarray | None = None
        self._bound = -np.inf
        self._stride = MESSAGES.first_stride

    @property
    def saved(self) -> SavedMessages:
        """The messages alone."""
        return SavedMessages(self._all, [m.shape for m in self._to])

    def start_from(self, other: SavedMessages, factor: float) -> None:
        """Copy the messages of the same core at other costs.

        Any messages give a lower bound. Messages of another core are ignored.

        Args:
          other: messages for the other costs.
          factor: unit of the other costs over the unit of these.
        """
        if other.shapes == self.saved.shapes:
            self._all[:] = factor * other.values

    def totals(self, costs: np.ndarray) -> np.ndarray:
        """Return the cost of every option plus all messages to it."""
        return costs + np.concatenate([to.sum(axis=0) for to in self._to])

    def round(self, costs: np.ndarray, choice: np.ndarray | None = None) -> float:
        """Update all nodes in both orders, with extrapolation.

        Messages change slowly, and in one direction for many rounds; they are therefore
        first extrapolated by a multiple of their last step. If the bound falls, the
        extrapolation is undone; any messages give a lower bound.

        Args:
          costs, choice: as in `sweep`; the same array of costs in every call.
        Returns:
          A lower bound on the objective, no less than that of the round before.
        """
        if costs is not self._costs:
            self._costs, self._before, self._bound = costs, None, -np.inf
        start, before = self._all.copy(), self._before
        if before is not None:
            self._all += self._stride * (start - before)
        self.sweep(costs, 0)
        bound = self.sweep(costs, 1, choice)
        if before is not None and bound < self._bound:
            self._all[:] = start
            self._before = None
            self._stride = max(self._stride * MESSAGES.shorter, MESSAGES.first_stride)
            return self._bound
        if before is not None:
            self._stride *= MESSAGES.longer
        self._before, self._bound = start, bound
        return bound

    def sweep(
        self, costs: np.ndarray, way: int, choice: np.ndarray | None = None
    ) -> float:
        """Update all nodes once.

        Args:
          costs: cost of every option, finite.
          way: 0: in the nodes' order; 1: in reverse.
          choice: array to fill with an option of every node, chosen during the sweep;
            None: none.
        Returns:
          A lower bound on the objective.
        """
        first, turns, kept = self._first, self._turns[way], self._all
        bound = 0.0
        for n in range(len(turns) - 1, -1, -1) if way else range(len(turns)):
            turn, to = turns[n], self._to[n]
            own = costs[first[n] : first[n + 1]]
            if choice is not None:
                choice[n] = _choose(own, turn, to, choice)
            total = own + np.add.reduce(to, axis=0)
            num_ahead, most = turn.num_ahead, max(turn.num_ahead, turn.num_behind, 1)
            if num_ahead < most:
                bound += (1.0 - num_ahead / most) * float(np.minimum.reduce(total))
            if not num_ahead:
                continue
            total /= most
            rest = total - to[turn.ahead]
            for k, distinct, place in turn.large:
                message = distinct.least(rest[k])
                least = float(np.minimum.reduce(message))
                bound += least
                kept[place] = message - least
            if not turn.rows:
                continue
            for k, table, part in zip(turn.rows, turn.tables, turn.parts, strict=True):
                np.add(table, rest[k][:, None], out=part)
            message = np.minimum.reduce(turn.reach, axis=0)
            low = np.minimum.reduceat(message, turn.starts)
            bound += float(np.add.reduce(low))
            message -= low[turn.of_part]
            kept[turn.into] = message
        return bound


def _choose(
    own: np.ndarray, turn: _Turn, to: np.ndarray, choice: np.ndarray
) -> np.intp:
    """Return the best option, given earlier nodes' options, later nodes' messages."""
    total = own + np.add.reduce(to[turn.ahead], axis=0)
    for j, table in turn.behind:
        total += table[:, choice[j]]
    return total.argmin()
