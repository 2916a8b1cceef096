"""Assignments under the hard memory limit: repair, and improvement within it."""

from __future__ import annotations

import numpy as np

from rhino_jax.solver.memory import Memory
from rhino_jax.solver.moves.moves import Moves
from rhino_jax.solver.parameters import MOVES


class Filled:
    """An assignment with its memory, updated incrementally.

    Attributes:
      labels: the assignment.
      over: by time, memory used less the room: at most 0 if it fits.
    """

    def __init__(self, memory: Memory, labels: np.ndarray) -> None:
        self._memory = memory
        self.labels = labels.copy()
        self.over = memory.profile(labels) - memory.room

    def switch(self, node: int, option: int) -> None:
        """Set a node to another option."""
        mine, spans = self._memory.of_node[node], self._memory.spans
        before = spans.lookups.entries(self.labels, mine)
        self.labels[node] = option
        added = spans.lookups.entries(self.labels, mine) - before
        for e, amount in zip(mine, added.tolist(), strict=True):
            if amount:
                self.over[spans.start[e] : spans.stop[e]] += amount

    def fits_around(self, node: int) -> bool:
        """Whether the limit holds throughout the lifetime of the node's memory."""
        spans = self._memory.spans
        return all(
            self.over[spans.start[e] : spans.stop[e]].max() <= 0
            for e in self._memory.of_node[node]
        )


def repair(moves: Moves, labels: np.ndarray) -> np.ndarray | None:
    """Return an assignment within the limit, near `labels`; None if none was found.

    Repeatedly makes the switch with the least cost per memory freed at the fullest
    time.
    """
    memory = moves.memory
    filled = Filled(memory, labels)
    nodes = np.repeat(np.arange(len(labels)), np.diff(memory.first))
    for _ in range(MOVES.most_switches):
        time = int(filled.over.argmax()) if len(filled.over) else 0
        if not len(filled.over) or filled.over[time] <= 0:
            return filled.labels
        held = memory.by_option(filled.labels, time)
        current = memory.first[:-1] + filled.labels
        freed = held[current][nodes] - held
        totals = moves.totals(moves.costs, filled.labels)
        more = totals - totals[current][nodes]
        helps = (freed > 0) & (more < moves.forbidden / 2)
        if not helps.any():
            return None
        useful = np.minimum(freed[helps], filled.over[time])
        rate = np.where(more[helps] > 0, more[helps] / useful, more[helps] * useful)
        column = int(np.flatnonzero(helps)[rate.argmin()])
        node = int(nodes[column])
        filled.switch(node, column - int(memory.first[node]))
    return None


def improve(moves: Moves, labels: np.ndarray) -> np.ndarray:
    """Switch single nodes of an assignment that fits to better options that fit."""
    memory = moves.memory
    filled = Filled(memory, labels)
    nodes = np.repeat(np.arange(len(labels)), np.diff(memory.first))
    for _ in range(MOVES.most_rounds):
        totals = moves.totals(moves.costs, filled.labels)
        gains = totals[memory.first[:-1] + filled.labels][nodes] - totals
        better = np.flatnonzero(gains > 0)
        switched: set[int] = set()
        for column in better[np.argsort(-gains[better], kind="stable")].tolist():
            node = int(nodes[column])
            if node in switched or any(
                j in switched for j, _ in moves.neighbours[node]
            ):
                continue
            before = int(filled.labels[node])
            filled.switch(node, column - int(memory.first[node]))
            if filled.fits_around(node):
                switched.add(node)
            else:
                filled.switch(node, before)
        if not switched:
            break
    return filled.labels
