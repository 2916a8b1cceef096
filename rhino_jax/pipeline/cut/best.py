"""The best cut of a graph, by CP-SAT.

Variables: for every node i and stage s but the last, y[i, s]: i is in stage s or
earlier. Constraints:

    y[i, s] <= y[i, s + 1]                                  one stage each
    y[j, s] <= y[i, s]            j reads a value of i      monotone
    y[j, s + 1] == y[i, s]        j is in the link of a chain after that of i
    c[v, s] >= y[i, s] - y[j, s]  v of i, read by j         v crosses hop s
    sum of op_ns in stage s, and of each direction of hop s, <= B
    all stages and hops from s on <= k B         k in flight at s, that it waits for
    memory of stage s <= limit

Objective: (m - 1) B + all stages + all hops, in nanoseconds. Interchangeable nodes are
in the order of their numbers (symmetry breaking).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from ortools.sat.python import cp_model

from rhino_jax.pipeline.cut.numbers import NO_LIMIT, CutArrays, price


@dataclass(frozen=True, slots=True)
class CutSolution:
    """CP-SAT's result.

    Attributes:
      stages: stage of every node; None if there is no cut, or none was found.
      bound_ns: lower bound on the step time of any cut.
      is_proved: whether it is proved that the cut is optimal, or that there is none.
    """

    stages: np.ndarray | None
    bound_ns: int
    is_proved: bool


def best(
    numbers: CutArrays,
    hint: np.ndarray | None = None,
    *,
    limit_ns: int = NO_LIMIT,
    effort: float = 10.0,
    gap: float = 0.0,
    seed: int = 0,
) -> CutSolution:
    """Return the cut with the shortest step time that CP-SAT finds.

    Args:
      numbers: the problem, contracted.
      hint: stages of a cut that fits; None: no hint.
      limit_ns: upper bound on the step time of cuts to search for.
      effort: limit on CP-SAT's deterministic seconds.
      gap: optimality gap at which the search stops, as a share of the step time.
      seed: seed of the search.
    """
    model = _CutModel(numbers, hint, limit_ns)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = seed
    solver.parameters.max_deterministic_time = effort
    solver.parameters.relative_gap_limit = gap
    status = solver.solve(model.model)
    bound = int(np.ceil(solver.best_objective_bound - 1e-6))
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return CutSolution(None, 0, status == cp_model.INFEASIBLE)
    stages = numbers.stages - 1 - model.value_of_ys(solver)
    is_best = status == cp_model.OPTIMAL and bound >= round(solver.objective_value)
    return CutSolution(stages, bound, is_best)


class _Row:
    """A sum of weighted variables and a constant."""

    def __init__(self, constant: int = 0) -> None:
        self.constant = constant
        self.variables: list[cp_model.IntVar] = []
        self.weights: list[int] = []

    def add(
        self, variables: Sequence[cp_model.IntVar], weights: Sequence[int] | np.ndarray
    ) -> None:
        for variable, weight in zip(variables, weights, strict=True):
            if weight:
                self.variables.append(variable)
                self.weights.append(int(weight))

    def include(self, other: _Row) -> None:
        self.constant += other.constant
        self.add(other.variables, other.weights)

    @property
    def sum(self) -> cp_model.LinearExpr:
        parts = cp_model.LinearExpr.weighted_sum(self.variables, self.weights)
        return parts + self.constant


class _CutModel:
    def __init__(
        self, numbers: CutArrays, hint: np.ndarray | None, limit_ns: int
    ) -> None:
        self.numbers = numbers
        self.model = cp_model.CpModel()
        self.hops = numbers.stages - 1
        self.y = [
            [self.model.new_bool_var(f"y{i},{s}") for s in range(self.hops)]
            for i in range(numbers.count)
        ]
        # The variables of all nodes by hop.
        self.until = [[row[s] for row in self.y] for s in range(self.hops)]
        self._order()
        self.crosses = [
            [self._crosses(v, s) for v in range(len(numbers.readers))]
            for s in range(self.hops)
        ]
        self._symmetry()
        self._objective(hint, limit_ns)
        self._memory()
        if hint is not None:
            for i, row in enumerate(self.y):
                for s, y in enumerate(row):
                    self.model.add_hint(y, int(hint[i] <= s))

    def _order(self) -> None:
        numbers = self.numbers
        for row in self.y:
            for a, b in pairwise(row):
                self.model.add_implication(a, b)
        for v, readers in enumerate(numbers.readers):
            for reader in readers:
                for s in range(self.hops):
                    source = self.y[numbers.sources[v]][s]
                    self.model.add_implication(self.y[reader][s], source)
        for i in np.flatnonzero(numbers.pins >= 0):
            for s in range(self.hops):
                self.model.add(self.y[i][s] == int(numbers.pins[i] <= s))
        for chain in numbers.chains:
            self._in_row(chain)

    def _in_row(self, chain: tuple[tuple[int, ...], ...]) -> None:
        for link in chain:
            for a, b in pairwise(link):
                self._equal(self.y[a], self.y[b])
        for before, after in pairwise(chain):
            # `before` is not in the last stage, and `after` not in the first.
            first, second = self.y[before[0]], self.y[after[0]]
            self._equal([0, *first], [*second, 1])

    def _equal(
        self,
        some: Sequence[cp_model.IntVar | int],
        others: Sequence[cp_model.IntVar | int],
    ) -> None:
        for a, b in zip(some, others, strict=True):
            self.model.add(a == b)

    def _crosses(self, v: int, s: int) -> cp_model.IntVar:
        """Add and return the variable that is 1 if a value is sent over a hop."""
        crosses = self.model.new_bool_var(f"c{v},{s}")
        source = self.y[self.numbers.sources[v]][s]
        for reader in self.numbers.readers[v]:
            self.model.add_bool_or(~source, self.y[reader][s], crosses)
        return crosses

    def _in_stage(self, per_node: np.ndarray, s: int) -> _Row:
        """Return the sum over the nodes of a stage."""
        row = _Row(int(per_node.sum()) if s == self.hops else 0)
        if s < self.hops:
            row.add(self.until[s], per_node)
        if s:
            row.add(self.until[s - 1], -per_node)
        return row

    def _objective(self, hint: np.ndarray | None, limit_ns: int) -> None:
        numbers, model = self.numbers, self.model
        least, most = numbers.least_bottleneck_ns, numbers.most_pace_ns
        bottleneck = model.new_int_var(least, most, "bottleneck")
        total = _Row()
        m = numbers.micro_batches
        total.add([bottleneck], [m - 1])
        for s in reversed(range(self.hops + 1)):
            stage = self._in_stage(numbers.op_ns[:, s], s)
            model.add(stage.sum <= bottleneck)
            model.add(stage.sum >= 1)
            total.include(stage)
            for way in range(2 if s < self.hops else 0):
                sent = _Row(int(numbers.latency_ns[s]))
                sent.add(self.crosses[s], numbers.value_ns[:, s, way])
                model.add(sent.sum <= bottleneck)
                total.include(sent)
            # The total so far: the stages and hops from here on, and (m - 1) B.
            if numbers.round_trips[s]:
                model.add(
                    total.sum <= (int(numbers.round_trips[s]) + m - 1) * bottleneck
                )
        self._once(total)
        model.minimize(total.sum)
        if limit_ns < NO_LIMIT:
            model.add(total.sum <= limit_ns)
        if hint is not None:
            model.add_hint(bottleneck, price(numbers, hint).bottleneck_ns)

    def _once(self, total: _Row) -> None:
        """Add the transfers of shared parameters' gradients between their readers."""
        numbers, model = self.numbers, self.model
        for p, readers in enumerate(numbers.shared):
            for s in range(self.hops):
                if not numbers.shared_ns[p, s]:
                    continue
                some = model.new_bool_var(f"some{p},{s}")
                meets = model.new_bool_var(f"meets{p},{s}")
                for r in readers:
                    model.add_implication(self.y[r][s], some)
                    model.add_bool_or(~some, self.y[r][s], meets)
                total.add([meets], [numbers.shared_ns[p, s]])

    def _memory(self) -> None:
        numbers, sizes = self.numbers, self.numbers.value_bytes
        for s in range(self.hops + 1):
            if numbers.limit_bytes[s] >= NO_LIMIT:
                continue
            in_flight = int(numbers.in_flight[s])
            own = numbers.own_bytes + in_flight * numbers.activation_bytes
            row = self._in_stage(own, s)
            if s:
                row.add(self.crosses[s - 1], (in_flight + 1) * sizes[:, 0])
            if s < self.hops:
                row.add(self.crosses[s], sizes[:, 1])
            read = [self._is_read(p, rs, s) for p, rs in enumerate(numbers.shared)]
            row.add(read, numbers.shared_bytes)
            self.model.add(row.sum <= int(numbers.limit_bytes[s]))

    def _is_read(self, p: int, readers: tuple[int, ...], s: int) -> cp_model.IntVar:
        found = self.model.new_bool_var(f"read{p},{s}")
        for r in readers:
            here = [~self.y[r][s]] if s < self.hops else []
            there = [self.y[r][s - 1]] if s else []
            self.model.add_bool_or(*here, *there, found)
        return found

    def _symmetry(self) -> None:
        for a, b in twins(self.numbers):
            for s in range(self.hops):
                self.model.add_implication(self.y[b][s], self.y[a][s])

    def value_of_ys(self, solver: cp_model.CpSolver) -> np.ndarray:
        """Return by node the number of its variables that are 1."""
        return np.array([sum(map(solver.boolean_value, row)) for row in self.y], int)


def twins(numbers: CutArrays) -> list[tuple[int, int]]:
    """Return pairs of interchangeable nodes.

    They have equal numbers, one value each of equal sizes for the same readers, and
    read the same values.
    """
    read: list[list[int]] = [[] for _ in range(numbers.count)]
    made: list[list[int]] = [[] for _ in range(numbers.count)]
    for v, readers in enumerate(numbers.readers):
        made[numbers.sources[v]].append(v)
        for reader in readers:
            read[reader].append(v)
    has_shared = {op for readers in numbers.shared for op in readers}
    is_linked = numbers.linked
    last: dict[object, int] = {}
    pairs = []
    for op in range(numbers.count):
        if op in has_shared or numbers.pins[op] >= 0 or is_linked[op]:
            continue
        key = (
            numbers.op_ns[op].tobytes(),
            int(numbers.activation_bytes[op]),
            int(numbers.own_bytes[op]),
            tuple(read[op]),
            tuple(
                (
                    numbers.readers[v],
                    numbers.value_bytes[v].tobytes(),
                    numbers.value_ns[v].tobytes(),
                )
                for v in made[op]
            ),
        )
        if key in last:
            pairs.append((last[key], op))
        last[key] = op
    return pairs
