"""The cheapest assignment within each of several restrictions of one problem to some
options.

Restrictions are reduced together, on arrays with one row each, as long as that is
faster than one after the other; then each alone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from rhino_jax.solver.incumbents import Effort
from rhino_jax.solver.pairwise import solve_reduced
from rhino_jax.solver.parameters import PRESOLVE
from rhino_jax.solver.problem import Labels, PairTable, Problem
from rhino_jax.solver.reduction import Core, assembled
from rhino_jax.utils.cache import Memo


@dataclass(frozen=True, eq=False)
class Restrictions:
    """The options that each of several restrictions leaves to kinds of nodes.

    Attributes:
      first: first option of every kind among those of all kinds.
      counts: [restrictions, kinds], number of options left.
      kinds: kind of every node.
      places: [restrictions, options of all kinds], position of an option among those
        left of its kind; -1 if it is not left.
      begin: first place of every kind in a row of `flat`.
      flat: [restrictions, places], the options left, kind after kind, as positions
        among those of the kind. All restrictions have equally many places: their last
        option is repeated.
    """

    first: np.ndarray
    counts: np.ndarray
    kinds: np.ndarray
    places: np.ndarray
    begin: np.ndarray
    flat: np.ndarray

    @classmethod
    def of(
        cls, permitted: np.ndarray, first: np.ndarray, kinds: np.ndarray
    ) -> Restrictions:
        """Build restrictions.

        Args:
          permitted: boolean, [restrictions, options of all kinds]; at least one of each
            kind.
          first, kinds: see `Restrictions`.
        """
        counts = np.add.reduceat(permitted, first, axis=1, dtype=np.int64)
        starts = np.cumsum(counts, axis=1) - counts
        sizes = np.diff(first, append=permitted.shape[1])
        ranks = np.cumsum(permitted, axis=1) - 1 - np.repeat(starts, sizes, axis=1)
        most = counts.max(axis=0)
        begin = np.cumsum(most) - most
        kind = np.repeat(np.arange(len(most)), most)
        rank = np.minimum(np.arange(len(kind)) - begin[kind], counts[:, kind] - 1)
        left = [np.flatnonzero(row) for row in permitted]
        flat = [
            row[place] - first[kind]
            for row, place in zip(left, starts[:, kind] + rank, strict=True)
        ]
        places = np.where(permitted, ranks, -1)
        return cls(first, counts, kinds, places, begin, np.array(flat))

    @cached_property
    def options(self) -> list[np.ndarray]:
        """Options of each node, [restrictions, places]; nodes of a kind share an
        array."""
        of_kind = np.split(self.flat, self.begin[1:], axis=1)
        return [of_kind[k] for k in self.kinds.tolist()]

    def expand(self, restriction: int, labels: np.ndarray) -> np.ndarray:
        """Convert an assignment of places to options of the whole problem, [nodes]."""
        return self.flat[restriction, self.begin[self.kinds] + labels]

    def contract(self, restriction: int, labels: np.ndarray) -> np.ndarray:
        """Convert options of the whole problem to places, [nodes]; -1 if not left."""
        return self.places[restriction, self.first[self.kinds] + labels]


def cheapest_restricted(
    problem: Problem,
    left: Restrictions,
    starts: Labels,
    effort: Effort,
    worth: float = math.inf,
) -> Labels:
    """Return the cheapest assignment within each restriction, [restrictions, nodes].

    Options are those of the whole problem. A restriction that allows more starts from
    the results of those that allow less, and one that allows less takes results of
    others that satisfy it.

    Args:
      problem: the problem; its memory is ignored.
      left: the options that the restrictions leave.
      starts: [restrictions, nodes], a known assignment of places in each.
      effort: limits for each; restrictions that its deadline leaves no time for keep
        `starts`.
      worth: a restriction whose assignment costs more than this many times the cheapest
        so far is not searched to the end.
    """
    if time.monotonic() > effort.deadline:
        return np.array([left.expand(row, start) for row, start in enumerate(starts)])
    core = _reduced(problem, left)
    met: list[tuple[float, Labels]] = []
    found: list[Labels] = []
    for row, start in enumerate(starts):
        if time.monotonic() > effort.deadline:
            found.append(start)
            continue
        part = _part(core, left, row)
        known = [start]
        for _, labels in sorted(met, key=lambda m: m[0]):
            mine = left.contract(row, labels)
            if (mine[list(part.costs)] >= 0).all():
                known.append(mine)
                break
        least = min((value for value, _ in met), default=math.inf)
        best = solve_reduced(part, known, replace(effort, worth_s=worth * least))
        found.append(best.labels)
        met.append((best.value, left.expand(row, best.labels)))
    chosen = {i: np.array([labels[i] for labels in found]) for i in core.costs}
    places = core.expand(chosen).T
    every = [left.expand(row, labels) for row, labels in enumerate(places)]
    return np.array(_shared(problem, left, every))


def _shared(
    problem: Problem, left: Restrictions, every: Sequence[Labels]
) -> list[Labels]:
    """Return by restriction the cheapest assignment of any that satisfies it."""
    cheapest_first = sorted(every, key=problem.objective)
    return [
        next(x for x in cheapest_first if (left.contract(row, x) >= 0).all())
        for row in range(len(every))
    ]


def _reduced(problem: Problem, left: Restrictions) -> Core:
    """Return all restricted problems in one, reduced."""
    memo, options = Memo(), left.options
    core = assembled(
        [memo.make(_some, c, o) for c, o in zip(problem.costs, options, strict=True)],
        [
            PairTable(i, j, memo.make(_some_pairs, table, options[i], options[j]))
            for i, j, table in problem.edges
        ],
        memo,
    )
    core.reduce(memo, max_cells=PRESOLVE.most_at_once)
    return core


def _some(costs: np.ndarray, options: np.ndarray) -> np.ndarray:
    return costs[options]


def _some_pairs(table: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    return table[rows[:, :, None], columns[:, None, :]]


def _part(core: Core, left: Restrictions, row: int) -> Core:
    """Return one of the problems, without repeated places, reduced further."""
    kinds = left.kinds
    counts = {i: int(left.counts[row, kinds[i]]) for i in core.costs}
    # Arrays that are shared between nodes remain shared.
    parts: dict[tuple[int, ...], np.ndarray] = {}

    def part(table: np.ndarray, *sizes: int) -> np.ndarray:
        key = id(table), *sizes
        found = parts.get(key)
        if found is None:
            found = parts[key] = table[row][tuple(map(slice, sizes))]
        return found

    alone = Core(
        {i: part(cost, counts[i]) for i, cost in core.costs.items()},
        {
            i: {j: part(t, counts[i], counts[j]) for j, t in around.items()}
            for i, around in core.tables.items()
        },
        core.size,
        core.constant[row],
    )
    alone.reduce(Memo())
    return alone
