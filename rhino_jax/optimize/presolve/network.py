"""A problem as a network, made smaller without losing any best choice.

Four exact steps, until none applies:
- an option that some neighbour has no partner for is dropped (arc consistency:
  Mackworth, "Consistency in networks of relations", AI 8 (1977));
- a node whose option follows from a neighbour's is merged into that neighbour, with
  its costs, its edges and its memory;
- an edge that charges for both ends apart is charged to them, and gone;
- an option is dropped that another beats in cost, with every neighbour, and in memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from rhino_jax.optimize.errors import UnsatisfiedError
from rhino_jax.optimize.problem import Problem


MOST_COMPARED = 256
"""Nodes of more options are not searched for options that another beats."""


@dataclass(frozen=True, slots=True, eq=False)
class Use:
    """Memory of a node's options from `start` up to, not including, `stop`."""

    start: int
    stop: int
    amounts: np.ndarray


@dataclass(slots=True, eq=False)
class Network:
    """What is left of a problem, with the way back.

    Attributes:
      costs: node → cost of each option left; infinite where it is forbidden.
      tables: node → neighbour → costs [options, neighbour's options], both ways.
      uses: node → memory, its own and that of nodes merged into it.
      options: node → the strategy that each option is.
      merged: nodes merged away, in order: node, into which, and the strategy that
        follows from each strategy of that one.
      limit: of memory.
    """

    costs: dict[int, np.ndarray]
    tables: dict[int, dict[int, np.ndarray]]
    uses: dict[int, list[Use]]
    options: dict[int, np.ndarray]
    limit: float
    merged: list[tuple[int, int, dict[int, int]]] = field(default_factory=list)

    def expand(self, chosen: dict[int, int]) -> list[int]:
        """A option for every node of the problem from options of those left."""
        strategies = {i: int(self.options[i][k]) for i, k in chosen.items()}
        for node, into, follows in reversed(self.merged):
            strategies[node] = follows[strategies[into]]
        return [strategies[i] for i in range(len(strategies))]


def build_network(problem: Problem) -> Network:
    """The network of a problem, reduced.

    Args:
      problem: infinite costs are forbidden; its memory is that of nodes alone.
    Raises:
      UnsatisfiedError: a node has no option that its neighbours allow.
    """
    costs = dict(enumerate(problem.costs))
    network = Network(
        costs,
        {i: {} for i in costs},
        {i: [] for i in costs},
        {i: np.arange(len(cost)) for i, cost in costs.items()},
        problem.limit,
    )
    for i, usage, start, stop in problem.node_usages:
        network.uses[i].append(Use(start, stop, usage))
    for i, j, table in problem.edges:
        if i == j:
            network.costs[i] = network.costs[i] + np.diagonal(table)
        else:
            _join(network, i, j, table)
    dirty: Iterable[int] = list(costs)
    while dirty:
        _make_consistent(network, dirty)
        _merge_followers(network)
        _charge_apart(network)
        dirty = _drop_beaten(network)
    return network


def _join(network: Network, i: int, j: int, table: np.ndarray) -> None:
    if j in network.tables[i]:
        table = network.tables[i][j] + table
    network.tables[i][j] = table
    network.tables[j][i] = table.T


def _keep(network: Network, node: int, mask: np.ndarray) -> None:
    index = np.flatnonzero(mask)
    network.costs[node] = network.costs[node][index]
    network.options[node] = network.options[node][index]
    network.uses[node] = [
        Use(u.start, u.stop, u.amounts[index]) for u in network.uses[node]
    ]
    for other, table in network.tables[node].items():
        network.tables[node][other] = table[index]
        network.tables[other][node] = table[index].T


def _make_consistent(network: Network, nodes: Iterable[int]) -> None:
    todo = deque(i for i in nodes if i in network.costs)
    waiting = set(todo)
    while todo:
        node = todo.popleft()
        waiting.discard(node)
        mask = np.isfinite(network.costs[node])
        for table in network.tables[node].values():
            mask &= np.isfinite(table).any(axis=1)
        if mask.all():
            continue
        if not mask.any():
            raise UnsatisfiedError(
                "`solve`: no choice avoids all that is forbidden.",
                where=f"node {node}",
                numbers=f"none of its {len(network.options[node])} options left is"
                " allowed with any of its neighbours' options",
                fix="allow one: give it a finite cost.",
            )
        _keep(network, node, mask)
        for other in network.tables[node]:
            if other not in waiting:
                waiting.add(other)
                todo.append(other)


def _merge_followers(network: Network) -> None:
    todo = deque(network.costs)
    waiting = set(todo)
    while todo:
        node = todo.popleft()
        waiting.discard(node)
        if node not in network.costs:
            continue
        for other, table in network.tables[node].items():
            allowed = np.isfinite(table)
            if not (allowed.sum(axis=0) <= 1).all():
                continue
            is_mutual = (allowed.sum(axis=1) <= 1).all()
            if is_mutual and len(network.tables[other]) < len(network.tables[node]):
                continue  # the one with fewer edges goes
            _merge(network, node, other, allowed.argmax(axis=0))
            for near in (other, *network.tables[other]):
                if near not in waiting:
                    waiting.add(near)
                    todo.append(near)
            break


def _merge(network: Network, node: int, into: int, option: np.ndarray) -> None:
    """Merge a node whose option is `option[k]` where the other takes k."""
    table = network.tables[node].pop(into)
    del network.tables[into][node]
    cost = network.costs.pop(node)[option]
    network.costs[into] = (
        network.costs[into] + cost + table[option, np.arange(len(option))]
    )
    network.uses[into] = network.uses[into] + [
        Use(u.start, u.stop, u.amounts[option]) for u in network.uses.pop(node)
    ]
    for other, rows in network.tables.pop(node).items():
        del network.tables[other][node]
        _join(network, into, other, rows[option])
    strategies = network.options.pop(node)[option].tolist()
    follows = dict(zip(network.options[into].tolist(), strategies, strict=True))
    network.merged.append((node, into, follows))


def _charge_apart(network: Network) -> None:
    """Take away the edges whose table is a sum of what each end pays alone."""
    for i in network.costs:
        for j in [j for j in network.tables[i] if i < j]:
            table = network.tables[i][j]
            if not np.isfinite(table).all():
                continue
            row, column = table[:, 0], table[0] - table[0, 0]
            if (table == row[:, None] + column).all():
                network.costs[i] = network.costs[i] + row
                network.costs[j] = network.costs[j] + column
                del network.tables[i][j], network.tables[j][i]


def _drop_beaten(network: Network) -> list[int]:
    """Drop options that another beats; the nodes around them."""
    changed: set[int] = set()
    for node, cost in network.costs.items():
        if not 1 < len(cost) <= MOST_COMPARED:
            continue
        columns = np.concatenate(
            [
                cost[:, None],
                *network.tables[node].values(),
                *(u.amounts[:, None] for u in network.uses[node]),
            ],
            axis=1,
        )
        alive = np.ones(len(cost), dtype=bool)
        for k in range(len(cost)):
            is_beaten = (columns[k] >= columns).all(axis=1) & alive
            is_beaten[k] = False
            alive[k] = not is_beaten.any()
        if not alive.all():
            _keep(network, node, alive)
            changed.add(node)
            changed.update(network.tables[node])
    return sorted(changed)
