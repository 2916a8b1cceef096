"""Messages: what every neighbour would pay for each option, passed on in turns.

Sequential tree-reweighted message passing (Kolmogorov, PAMI 28 (2006), section 5).
Messages stay good starts while the costs of options move, as prices of memory do.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from rhino_jax.solver.moves import Moves


class _Turn(NamedTuple):
    """What a node does when its turn comes.

    Attributes:
      incoming: numbers of the messages to it.
      ahead: of neighbours whose turn is still to come, the message there, the one
        back, and the table.
      behind: neighbours that had their turn, with the table.
    """

    incoming: list[int]
    ahead: list[tuple[int, int, np.ndarray]]
    behind: list[tuple[int, np.ndarray]]


def _turn(
    node: int,
    near: list[tuple[int, np.ndarray]],
    numbers: dict[tuple[int, int], int],
    tables: list[np.ndarray],
    way: int,
) -> _Turn:
    ahead = [m for m, _ in near if (m > node) == (way == 0)]
    behind = [m for m, _ in near if (m > node) != (way == 0)]
    return _Turn(
        [numbers[m, node] for m, _ in near],
        [(numbers[node, m], numbers[m, node], tables[numbers[node, m]]) for m in ahead],
        [(m, tables[numbers[node, m]]) for m in behind],
    )


class Messages:
    """The messages over a network's edges.

    Args:
      moves: the network's costs and tables.
    """

    def __init__(self, moves: Moves) -> None:
        self._first = moves.memory.first.tolist()
        numbers: dict[tuple[int, int], int] = {}
        tables: list[np.ndarray] = []
        for n, near in enumerate(moves.neighbours):
            for m, table in near:
                numbers[n, m] = len(tables)
                tables.append(np.ascontiguousarray(table))
        self._messages = [np.zeros(t.shape[1]) for t in tables]
        self._turns = [
            [
                _turn(n, near, numbers, tables, way)
                for n, near in enumerate(moves.neighbours)
            ]
            for way in (0, 1)
        ]

    def start_from(self, other: Messages, factor: float) -> None:
        """Take over the messages of the same network at other costs: any messages
        give a lower bound. Those of another network are left.

        Args:
          other: passed over the other costs.
          factor: what a unit of theirs is in units of these.
        """
        shapes, others = ([m.shape for m in x._messages] for x in (self, other))
        if shapes == others:
            self._messages = [factor * m for m in other._messages]

    def sweep(self, costs: np.ndarray, way: int) -> tuple[np.ndarray, float]:
        """Visit all nodes once.

        Args:
          costs: of every option, finite.
          way: 0: in the nodes' order; 1: against it.
        Returns:
          A choice made on the way, and a lower bound on the objective.
        """
        messages, first = self._messages, self._first
        labels = np.zeros(len(first) - 1, dtype=int)
        bound = 0.0
        nodes = range(len(labels))
        for n in reversed(nodes) if way else nodes:
            incoming, ahead, behind = self._turns[way][n]
            own = costs[first[n] : first[n + 1]]
            total = own.copy()
            for m in incoming:
                total += messages[m]
            choice = own.copy()
            for j, table in behind:
                choice += table[:, labels[j]]
            for _, back, _ in ahead:
                choice += messages[back]
            labels[n] = choice.argmin()
            share = 1.0 / max(len(ahead), len(behind), 1)
            bound += (1.0 - share * len(ahead)) * np.minimum.reduce(total)
            total *= share
            for there, back, table in ahead:
                reach = (total - messages[back])[:, None] + table
                message = np.minimum.reduce(reach, axis=0)
                low = np.minimum.reduce(message)
                bound += low
                message -= low
                messages[there] = message
        return labels, float(bound)
