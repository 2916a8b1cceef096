"""Simplification of a problem that preserves an optimal assignment.

Four exact steps, until none applies:
- an option that no option of some neighbour is compatible with is dropped (arc
  consistency:
  Mackworth, "Consistency in networks of relations", AI 8 (1977));
- a node whose option is determined by a neighbour's is merged into that neighbour, with
  its costs, its edges and its memory;
- an edge whose table is a sum of one cost per end is added to the nodes, and removed;
- a dominated option is dropped: another is no worse in cost, with every neighbour, and
  in memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np

from rhino_jax.solver.parameters import PRESOLVE
from rhino_jax.solver.problem import NodeUsage, Problem, UnsatisfiedError
from rhino_jax.solver.reduction import Core, Followed, KeptOptions, core_of
from rhino_jax.utils.cache import Memo


def simplify(problem: Problem) -> Core:
    """Return the core that remains after these steps.

    Args:
      problem: the problem; infinite costs are forbidden options, and only nodes have
        memory.
    Raises:
      UnsatisfiedError: a node has no option that its neighbours allow.
    """
    assert not problem.edge_usages
    core = core_of(problem, Memo())
    dirty: Iterable[int] = list(core.costs)
    while dirty:
        _make_consistent(core, dirty)
        _merge_followers(core)
        _charge_apart(core)
        dirty = _drop_beaten(core)
    return core


def _keep(core: Core, node: int, mask: np.ndarray) -> None:
    index = np.flatnonzero(mask)
    core.costs[node] = core.costs[node][index]
    core.steps.append(KeptOptions(node, index))
    _use(core, node, core.node_usages.get(node, ()), index)
    for other, table in core.tables[node].items():
        core.tables[node][other] = table[index]
        core.tables[other][node] = table[index].T


def _make_consistent(core: Core, nodes: Iterable[int]) -> None:
    todo = deque(i for i in nodes if i in core.costs)
    waiting = set(todo)
    while todo:
        node = todo.popleft()
        waiting.discard(node)
        mask = np.isfinite(core.costs[node])
        for table in core.tables[node].values():
            mask &= np.isfinite(table).any(axis=1)
        if mask.all():
            continue
        if not mask.any():
            raise UnsatisfiedError(
                "`solve`: no choice avoids all that is forbidden.",
                where=f"node {node}",
                numbers=f"none of its {len(core.costs[node])} options left is"
                " allowed with any of its neighbours' options",
                fix="allow one: give it a finite cost.",
            )
        _keep(core, node, mask)
        for other in core.tables[node]:
            if other not in waiting:
                waiting.add(other)
                todo.append(other)


def _merge_followers(core: Core) -> None:
    todo = deque(core.costs)
    waiting = set(todo)
    while todo:
        node = todo.popleft()
        waiting.discard(node)
        if node not in core.costs:
            continue
        for other, table in core.tables[node].items():
            allowed = np.isfinite(table)
            if not (allowed.sum(axis=0) <= 1).all():
                continue
            is_mutual = (allowed.sum(axis=1) <= 1).all()
            if is_mutual and len(core.tables[other]) < len(core.tables[node]):
                continue  # the one with fewer edges goes
            _merge(core, node, other, allowed.argmax(axis=0))
            for near in (other, *core.tables[other]):
                if near not in waiting:
                    waiting.add(near)
                    todo.append(near)
            break


def _merge(core: Core, node: int, into: int, option: np.ndarray) -> None:
    """Merge a node whose option is `option[k]` if the other takes k."""
    table = core.tables[node].pop(into)
    del core.tables[into][node]
    cost = core.costs.pop(node)[option]
    core.costs[into] = core.costs[into] + cost + table[option, np.arange(len(option))]
    own = core.node_usages.get(into, [])
    _use(core, into, core.node_usages.pop(node, ()), option)
    core.node_usages[into] = own + core.node_usages[into]
    for other, rows in core.tables.pop(node).items():
        del core.tables[other][node]
        core.add(into, other, rows[option], Memo())
    core.steps.append(Followed(node, into, option))


def _use(
    core: Core, node: int, usages: Iterable[NodeUsage], option: np.ndarray
) -> None:
    """Set a node's memory to that of some options, one for each of its own."""
    core.node_usages[node] = [
        NodeUsage(node, usage[option], start, stop) for _, usage, start, stop in usages
    ]


def _charge_apart(core: Core) -> None:
    """Remove edges whose table is a sum of one cost per end."""
    for i in core.costs:
        for j in [j for j in core.tables[i] if i < j]:
            table = core.tables[i][j]
            if not np.isfinite(table).all():
                continue
            row, column = table[:, 0], table[0] - table[0, 0]
            if (table == row[:, None] + column).all():
                core.costs[i] = core.costs[i] + row
                core.costs[j] = core.costs[j] + column
                del core.tables[i][j], core.tables[j][i]


def _drop_beaten(core: Core) -> list[int]:
    """Drop dominated options; return the nodes around them."""
    changed: set[int] = set()
    for node, cost in core.costs.items():
        if not 1 < len(cost) <= PRESOLVE.most_compared:
            continue
        columns = np.concatenate(
            [
                cost[:, None],
                *core.tables[node].values(),
                *(u.usage[:, None] for u in core.node_usages.get(node, ())),
            ],
            axis=1,
        )
        alive = np.ones(len(cost), dtype=bool)
        for k in range(len(cost)):
            is_beaten = (columns[k] >= columns).all(axis=1) & alive
            is_beaten[k] = False
            alive[k] = not is_beaten.any()
        if not alive.all():
            _keep(core, node, alive)
            changed.add(node)
            changed.update(core.tables[node])
    return sorted(changed)
