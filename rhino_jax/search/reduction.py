"""Exact reductions: nodes without a choice, or with at most two neighbours, go.

A node with one option is charged to its neighbours. A node with one neighbour folds
into that neighbour's costs, a node with two into a table between them (rules R0 to R2
of partitioned Boolean quadratic programming: Scholz and Eckstein, "Register allocation
for irregular architectures", LCTES 2002).
Most of a jaxpr disappears this way. What is left is the core.

Alike nodes share their arrays, and so do what they leave behind: each is made once.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import numpy as np

from rhino_jax.search.makes import Makes
from rhino_jax.search.problem import Labels, Problem


MAX_CELLS = 40_000_000
"""A node whose elimination would touch more cells than this stays in the core:
at about 1 ns a cell that is 0.04 s."""


SMALL_CELLS = 4_000
"""Tables up to which it is quicker to compute all than to look for equal columns."""


@dataclass(slots=True, eq=False)
class Core:
    """What is left of a pairwise problem, with the way back.

    Attributes:
      costs: node → costs, of the nodes that are left.
      tables: node → neighbour → table, both directions held.
      removed: eliminated nodes in order, with their costs and tables then.
      size: number of nodes of the whole problem.
    """

    costs: dict[int, np.ndarray]
    tables: dict[int, dict[int, np.ndarray]]
    removed: list[tuple[int, np.ndarray, dict[int, np.ndarray]]] = field(
        default_factory=list
    )
    size: int = 0

    def expand(self, chosen: dict[int, int]) -> Labels:
        """Labels of all nodes from labels of the core: each removed node's best."""
        # Single entries of a list are read faster than those of an array.
        labels = [0] * self.size
        for node, label in chosen.items():
            labels[node] = label
        for node, cost, tables in reversed(self.removed):
            if len(cost) == 1:
                continue
            total = cost
            for other, table in tables.items():
                total = total + table[:, labels[other]]
            labels[node] = int(total.argmin())
        return np.array(labels, dtype=np.int64)


def adjacency(problem: Problem) -> Core:
    """The pairwise part of a problem, parallel edges added up."""
    return _adjacency(problem, Makes())


def _adjacency(problem: Problem, makes: Makes) -> Core:
    costs = {i: np.asarray(c, dtype=np.float64) for i, c in enumerate(problem.costs)}
    tables: dict[int, dict[int, np.ndarray]] = {i: {} for i in costs}
    for edge in problem.edges:
        i, j = edge.source, edge.target
        if i == j:
            costs[i] = costs[i] + np.diagonal(edge.table)
            continue
        _add(tables, i, j, edge.table, makes)
    return Core(costs, tables, size=len(problem.costs))


def _add(
    tables: dict[int, dict[int, np.ndarray]],
    i: int,
    j: int,
    table: np.ndarray,
    makes: Makes,
) -> None:
    before = tables[i].get(j)
    if before is not None:
        table = makes.make(np.add, before, table)
    tables[i][j] = table
    tables[j][i] = makes.transposed(table)


def reduce(problem: Problem, keep: frozenset[int] = frozenset()) -> Core:
    """Minimise away nodes with at most two neighbours, fewest options first.

    Args:
      problem: its memory is ignored; price it first (`Problem.priced`) or `keep`
        the nodes that use any.
      keep: nodes that must stay in the core.
    """
    makes = Makes()
    core = _adjacency(problem, makes)
    tables, costs = core.tables, core.costs
    for node in [i for i, cost in costs.items() if len(cost) == 1 and i not in keep]:
        _settle(core, node, makes)
    queue = [
        (_work(core, i), i) for i in costs if len(tables[i]) <= 2 and i not in keep
    ]
    heapq.heapify(queue)
    while queue:
        work, node = heapq.heappop(queue)
        if node not in costs or len(tables[node]) > 2 or work > MAX_CELLS:
            continue
        actual = _work(core, node)
        if actual != work:
            heapq.heappush(queue, (actual, node))
            continue
        cost, around = costs.pop(node), tables.pop(node)
        core.removed.append((node, cost, around))
        for other in around:
            del tables[other][node]
        if len(around) == 1:
            ((other, table),) = around.items()
            costs[other] = makes.make(_charged, costs[other], cost, table)
        elif len(around) == 2:
            (a, table_a), (b, table_b) = around.items()
            through = makes.make(_through, cost, table_a, table_b)
            _add(tables, a, b, through, makes)
        for other in around:
            if len(tables[other]) <= 2 and other not in keep:
                heapq.heappush(queue, (_work(core, other), other))
    return core


def _settle(core: Core, node: int, makes: Makes) -> None:
    """Take out a node that has one option."""
    cost, around = core.costs.pop(node), core.tables.pop(node)
    core.removed.append((node, cost, {}))
    for other, table in around.items():
        core.costs[other] = makes.make(_charged_first, core.costs[other], table)
        del core.tables[other][node]


def _charged_first(costs: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Costs with those of an only option beside them."""
    return costs + table[0]


def _charged(costs: np.ndarray, own: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Costs with those of a node that makes its best choice beside them."""
    return costs + np.minimum.reduce(own[:, None] + table, axis=0)


def _work(core: Core, node: int) -> int:
    cells = len(core.costs[node])
    for other in core.tables[node]:
        cells *= len(core.costs[other])
    return cells


def _through(cost: np.ndarray, to_a: np.ndarray, to_b: np.ndarray) -> np.ndarray:
    """min over the node's options of its cost and both tables: [options of a, of b].

    Equal columns of the tables (options of a neighbour that look alike from here)
    are computed once.
    """
    if to_a.size * to_b.shape[1] <= SMALL_CELLS:
        sums = (cost[:, None] + to_a)[:, :, None] + to_b[:, None, :]
        return np.minimum.reduce(sums, axis=0)
    a_columns, a_index = _unique_columns(to_a)
    b_columns, b_index = _unique_columns(to_b)
    left = cost[:, None] + a_columns
    out = np.full((left.shape[1], b_columns.shape[1]), np.inf)
    for k in range(len(cost)):
        np.minimum(out, left[k][:, None] + b_columns[k][None, :], out=out)
    return out[np.ix_(a_index, b_index)]


def _unique_columns(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    seen: dict[bytes, int] = {}
    index = np.empty(table.shape[1], dtype=np.int64)
    columns = np.ascontiguousarray(table.T)
    first: list[int] = []
    for j in range(len(columns)):
        key = columns[j].tobytes()
        if key not in seen:
            seen[key] = len(first)
            first.append(j)
        index[j] = seen[key]
    return table[:, first], index
