"""Exact reductions: nodes with one option, or with at most two neighbours, are removed.

A node with one option is charged to its neighbours. A node with one neighbour folds
into that neighbour's costs, a node with two into a table between them (rules R0 to R2
of partitioned Boolean quadratic programming: Scholz and Eckstein, "Register allocation
for irregular architectures", LCTES 2002).
Most of a jaxpr disappears this way. The remaining problem is the core.

Equivalent nodes share their arrays, and so do the results: each is computed once.
Problems of one graph are reduced at once: their arrays have equal leading dims.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from rhino_jax.solver.parameters import PRESOLVE
from rhino_jax.solver.problem import (
    EdgeUsage,
    Labels,
    NodeUsage,
    PairTable,
    Problem,
)
from rhino_jax.utils.cache import Memo


class Eliminated(NamedTuple):
    """A removed node, which takes its best option; with its costs and tables then."""

    node: int
    costs: np.ndarray
    tables: dict[int, np.ndarray]


class Followed(NamedTuple):
    """A node whose option is determined by another's: `option[the other's]`."""

    node: int
    other: int
    option: np.ndarray


class KeptOptions(NamedTuple):
    """A node of whose options only these remain."""

    node: int
    options: np.ndarray


@dataclass(slots=True, eq=False)
class Core:
    """The reduced form of a pairwise problem, or of several of one graph.

    With the steps to restore full assignments.

    Attributes:
      costs: node → costs [..., options], for the remaining nodes.
      tables: node → neighbour → table [..., options, its options], in both directions.
      size: number of nodes of the whole problem.
      constant: [...], cost of nodes that were removed without a neighbour.
      steps: removals, in order.
      node_usages: node → memory, its own and that of nodes that follow it.
      edge_usages: memory of pairs of nodes.
      limit: memory limit.
    """

    costs: dict[int, np.ndarray]
    tables: dict[int, dict[int, np.ndarray]]
    size: int
    constant: np.ndarray
    steps: list[Eliminated | Followed | KeptOptions] = field(default_factory=list)
    node_usages: dict[int, list[NodeUsage]] = field(default_factory=dict)
    edge_usages: list[EdgeUsage] = field(default_factory=list)
    limit: float = float("inf")

    @property
    def usages(self) -> list[NodeUsage | EdgeUsage]:
        """All memory: of pairs, then of nodes in order."""
        own = [u for node in sorted(self.node_usages) for u in self.node_usages[node]]
        return [*self.edge_usages, *own]

    def expand(self, chosen: Mapping[int, int | np.ndarray]) -> Labels:
        """Return options of all nodes from options of the core's nodes.

        Args:
          chosen: node of the core → its option; [problems] for several problems.
        Returns:
          [nodes, ...].
        """
        shape = self.constant.shape
        several = tuple(np.arange(n) for n in shape)
        # Single entries of a list are read faster than those of an array.
        labels: list[int | np.ndarray] = [np.zeros(shape, int) if shape else 0]
        labels *= self.size
        for node, label in chosen.items():
            labels[node] = label
        for step in reversed(self.steps):
            if isinstance(step, KeptOptions):
                labels[step.node] = step.options[labels[step.node]]
            elif isinstance(step, Followed):
                labels[step.node] = step.option[labels[step.other]]
            elif step.costs.shape[-1] > 1:
                total = step.costs
                for other, table in step.tables.items():
                    total = total + table[*several, :, labels[other]]
                labels[step.node] = total.argmin(axis=-1)  # the first of equals
        return np.array(labels, dtype=np.int64)

    def reduce(
        self,
        memo: Memo,
        keep: frozenset[int] = frozenset(),
        max_cells: int = PRESOLVE.most_cells,
    ) -> None:
        """Minimise out nodes with at most two neighbours, fewest options first.

        Args:
          memo: cache of results for equivalent nodes.
          keep: nodes that must remain.
          max_cells: a node whose elimination would touch more cells remains.
        """
        costs, tables = self.costs, self.tables
        ones = [i for i, cost in costs.items() if cost.shape[-1] == 1 and i not in keep]
        for node in ones:
            self._settle(node, memo)
        queue = [(self._work(i), i) for i in self._light(costs, keep)]
        heapq.heapify(queue)
        while queue:
            work, node = heapq.heappop(queue)
            if node not in costs or len(tables[node]) > 2 or work > max_cells:
                continue
            actual = self._work(node)
            if actual != work:
                heapq.heappush(queue, (actual, node))
                continue
            around = self._eliminate(node, memo)
            for other in self._light(around, keep):
                heapq.heappush(queue, (self._work(other), other))

    def _light(self, nodes: Iterable[int], keep: frozenset[int]) -> list[int]:
        return [i for i in nodes if len(self.tables[i]) <= 2 and i not in keep]

    def _settle(self, node: int, memo: Memo) -> None:
        """Remove a node with one option."""
        cost, around = self.costs.pop(node), self.tables.pop(node)
        self.steps.append(Eliminated(node, cost, {}))
        self.constant = self.constant + cost[..., 0]
        for other, table in around.items():
            self.costs[other] = memo.make(_charged_first, self.costs[other], table)
            del self.tables[other][node]

    def _eliminate(self, node: int, memo: Memo) -> dict[int, np.ndarray]:
        """Remove a node with at most two neighbours; return these, with its tables."""
        cost, around = self.costs.pop(node), self.tables.pop(node)
        self.steps.append(Eliminated(node, cost, around))
        for other in around:
            del self.tables[other][node]
        if not around:
            self.constant = self.constant + cost.min(axis=-1)
        elif len(around) == 1:
            ((other, table),) = around.items()
            self.costs[other] = memo.make(_charged, self.costs[other], cost, table)
        else:
            (a, table_a), (b, table_b) = around.items()
            self.add(a, b, memo.make(_through, cost, table_a, table_b), memo)
        return around

    def add(self, i: int, j: int, table: np.ndarray, memo: Memo) -> None:
        """Add a cost table between two nodes."""
        before = self.tables[i].get(j)
        if before is not None:
            table = memo.make(np.add, before, table)
        self.tables[i][j] = table
        self.tables[j][i] = memo.transposed(table)

    def _work(self, node: int) -> int:
        cells = self.costs[node].size
        for other in self.tables[node]:
            cells *= self.costs[other].shape[-1]
        return cells


def assembled(
    costs: Sequence[np.ndarray], edges: Iterable[PairTable], memo: Memo
) -> Core:
    """Return an unreduced core from costs of nodes and edges.

    Args:
      costs: [..., options] of every node.
      edges: edges with tables [..., source's options, target's options]; several may
        join the same two nodes.
      memo: cache of results for equivalent nodes.
    """
    core = Core(
        {i: np.asarray(c, dtype=np.float64) for i, c in enumerate(costs)},
        {i: {} for i in range(len(costs))},
        len(costs),
        np.zeros(costs[0].shape[:-1] if costs else ()),
    )
    for i, j, table in edges:
        if i == j:
            own = np.diagonal(table, axis1=-2, axis2=-1)
            core.costs[i] = core.costs[i] + own
            continue
        core.add(i, j, table, memo)
    return core


def core_of(
    problem: Problem, memo: Memo, allowed: Sequence[np.ndarray] | None = None
) -> Core:
    """Return an unreduced core of a problem, with its memory.

    Args:
      problem: the whole problem.
      memo: cache of results for equivalent nodes.
      allowed: by node, the options to keep; None: all.
    """
    if allowed is None:
        core = assembled(problem.costs, problem.edges, memo)
        usages = problem.usages
    else:

        def part(table: np.ndarray, *nodes: int) -> np.ndarray:
            return memo.make(_restricted, table, *(allowed[i] for i in nodes))

        core = assembled(
            [part(cost, i) for i, cost in enumerate(problem.costs)],
            [PairTable(i, j, part(t, i, j)) for i, j, t in problem.edges],
            memo,
        )
        core.steps += [KeptOptions(i, options) for i, options in enumerate(allowed)]
        usages = [
            u._replace(usage=part(u.usage, *u.nodes[: u.usage.ndim]))
            for u in problem.usages
        ]
    for u in usages:
        if isinstance(u, NodeUsage):
            core.node_usages.setdefault(u.node, []).append(u)
        else:
            core.edge_usages.append(u)
    core.limit = problem.limit
    return core


def _restricted(table: np.ndarray, *options: np.ndarray) -> np.ndarray:
    """Return the rows, or rows and columns, of some options."""
    return table[np.ix_(*options)]


def reduce(problem: Problem) -> Core:
    """Return the core of a problem: nodes that can be minimised out are removed.

    Args:
      problem: the problem; its memory is ignored, move it to the objective first
        (`Problem.priced`).
    """
    memo = Memo()
    core = assembled(problem.costs, problem.edges, memo)
    core.reduce(memo)
    return core


def _charged_first(costs: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Add the costs of a neighbour's only option."""
    return costs + table[..., 0, :]


def _charged(costs: np.ndarray, own: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Add the costs of a neighbour that takes its best option."""
    return costs + np.minimum.reduce(own[..., None] + table, axis=-2)


def _through(cost: np.ndarray, to_a: np.ndarray, to_b: np.ndarray) -> np.ndarray:
    """Return the minimum over the node's options, [..., options of a, options of b].

    The sum of its cost and both tables is minimised. Equal columns of the tables
    (options of a neighbour with equal costs here) are computed once.
    """
    if to_a.size * to_b.shape[-1] <= PRESOLVE.few_cells:
        sums = (cost[..., None] + to_a)[..., None] + to_b[..., None, :]
        return np.minimum.reduce(sums, axis=-3)
    a_columns, a_index = unique_columns(to_a)
    b_columns, b_index = unique_columns(to_b)
    left = cost[..., None] + a_columns
    out = np.full((*left.shape[:-2], left.shape[-1], b_columns.shape[-1]), np.inf)
    sums = np.empty_like(out)
    for k in range(cost.shape[-1]):
        np.add(left[..., k, :, None], b_columns[..., k, None, :], sums)
        np.minimum(out, sums, out=out)
    return out[..., a_index[:, None], b_index]


def unique_columns(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct columns of a table [..., rows, columns], and indices."""
    seen: dict[bytes, int] = {}
    index = np.empty(table.shape[-1], dtype=np.int64)
    columns = np.ascontiguousarray(np.moveaxis(table, -1, 0))
    first: list[int] = []
    for j in range(len(columns)):
        key = columns[j].tobytes()
        if key not in seen:
            seen[key] = len(first)
            first.append(j)
        index[j] = seen[key]
    return table[..., first], index
