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
from typing import Any

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
    model = cp_model.CpModel()
    y = [
        [model.new_bool_var(f"y{i},{s}") for s in range(numbers.stages - 1)]
        for i in range(numbers.count)
    ]
    _add_order(model, numbers, y)
    _add_costs(model, numbers, y, hint, limit_ns)
    for row, stage in zip(y, () if hint is None else hint, strict=False):
        for s, variable in enumerate(row):
            model.add_hint(variable, int(stage <= s))
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = seed
    solver.parameters.max_deterministic_time = effort
    solver.parameters.relative_gap_limit = gap
    status = solver.solve(model)
    bound = int(np.ceil(solver.best_objective_bound - 1e-6))
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return CutSolution(None, 0, status == cp_model.INFEASIBLE)
    later = [sum(map(solver.boolean_value, row)) for row in y]
    is_best = status == cp_model.OPTIMAL and bound >= round(solver.objective_value)
    return CutSolution(numbers.stages - 1 - np.array(later, int), bound, is_best)


def _add_order(
    model: cp_model.CpModel, numbers: CutArrays, y: Sequence[Sequence[Any]]
) -> None:
    """Add the constraints on stages of nodes: by order, pins, chains and symmetry."""

    def equal(some: Sequence[Any], others: Sequence[Any]) -> None:
        for a, b in zip(some, others, strict=True):
            model.add(a == b)

    for row in y:
        for a, b in pairwise(row):
            model.add_implication(a, b)
    for source, readers in zip(numbers.sources, numbers.readers, strict=True):
        for reader in readers:
            for a, b in zip(y[reader], y[source], strict=True):
                model.add_implication(a, b)
    for i in map(int, np.flatnonzero(numbers.pins >= 0)):
        equal(y[i], [int(numbers.pins[i] <= s) for s in range(len(y[i]))])
    for chain in numbers.chains:
        for link in chain:
            for a, b in pairwise(link):
                equal(y[a], y[b])
        for before, after in pairwise(chain):
            # `before` is not in the last stage, and `after` not in the first.
            equal([0, *y[before[0]]], [*y[after[0]], 1])
    for one, other in twins(numbers):
        for a, b in zip(y[other], y[one], strict=True):
            model.add_implication(a, b)


def _add_costs(
    model: cp_model.CpModel,
    numbers: CutArrays,
    y: Sequence[Sequence[Any]],
    hint: np.ndarray | None,
    limit_ns: int,
) -> None:
    """Add the objective, and the constraints on memory.

    Args:
      model: the model.
      numbers: the problem.
      y: variables by node and stage but the last.
      hint, limit_ns: as for `best`.
    """
    hops, m = numbers.stages - 1, numbers.micro_batches
    until = [[row[s] for row in y] for s in range(hops)] + [[1] * numbers.count]

    def any_of(name: str, *clauses: Sequence[Any]) -> Any:
        """Return a variable that is 1 if a clause is not satisfied."""
        found = model.new_bool_var(name)
        for clause in clauses:
            model.add_bool_or(*clause, found)
        return found

    def in_stage(per_node: np.ndarray, s: int) -> list[tuple[Any, int]]:
        """Return the sum over the nodes of a stage, as variables and weights."""
        before = zip(until[s - 1], -per_node, strict=True) if s else ()
        return [*zip(until[s], per_node, strict=True), *before]

    def total_of(terms: Sequence[tuple[Any, int]]) -> Any:
        used = [(variable, int(weight)) for variable, weight in terms if weight]
        return (
            cp_model.LinearExpr.weighted_sum(*map(list, zip(*used, strict=True)))
            if used
            else 0
        )

    # Variables that are 1 if a value is sent over a hop.
    crosses = [
        [
            any_of(f"c{v},{s}", *([~until[s][source], until[s][r]] for r in readers))
            for v, (source, readers) in enumerate(
                zip(numbers.sources, numbers.readers, strict=True)
            )
        ]
        for s in range(hops)
    ]
    least, most = numbers.least_bottleneck_ns, numbers.most_pace_ns
    bottleneck = model.new_int_var(least, most, "bottleneck")
    total: list[tuple[Any, int]] = [(bottleneck, m - 1)]
    for s in reversed(range(hops + 1)):
        stage = in_stage(numbers.op_ns[:, s], s)
        model.add(total_of(stage) <= bottleneck)
        model.add(total_of(stage) >= 1)
        total += stage
        for way in range(2 if s < hops else 0):
            times = numbers.value_ns[:, s, way]
            sent = [(1, numbers.latency_ns[s]), *zip(crosses[s], times, strict=True)]
            model.add(total_of(sent) <= bottleneck)
            total += sent
        # The total so far: the stages and hops from here on, and (m - 1) B.
        if trips := int(numbers.round_trips[s]):
            model.add(total_of(total) <= (trips + m - 1) * bottleneck)
    # Shared parameters' gradients are sent once, between their readers.
    for p, readers in enumerate(numbers.shared):
        for s in map(int, np.flatnonzero(numbers.shared_ns[p])):
            some = model.new_bool_var(f"some{p},{s}")
            for r in readers:
                model.add_implication(y[r][s], some)
            meets = any_of(f"meets{p},{s}", *([~some, y[r][s]] for r in readers))
            total.append((meets, numbers.shared_ns[p, s]))
    model.minimize(total_of(total))
    if limit_ns < NO_LIMIT:
        model.add(total_of(total) <= limit_ns)
    if hint is not None:
        model.add_hint(bottleneck, price(numbers, hint).bottleneck_ns)
    for s in map(int, np.flatnonzero(numbers.limit_bytes < NO_LIMIT)):
        in_flight = int(numbers.in_flight[s])
        row = in_stage(numbers.own_bytes + in_flight * numbers.activation_bytes, s)
        if s:
            received = (in_flight + 1) * numbers.value_bytes[:, 0]
            row += zip(crosses[s - 1], received, strict=True)
        if s < hops:
            row += zip(crosses[s], numbers.value_bytes[:, 1], strict=True)
        for p, readers in enumerate(numbers.shared):
            ends = [
                [*([~y[r][s]] if s < hops else []), *([y[r][s - 1]] if s else [])]
                for r in readers
            ]
            row.append((any_of(f"read{p},{s}", *ends), numbers.shared_bytes[p]))
        model.add(total_of(row) <= int(numbers.limit_bytes[s]))


def twins(numbers: CutArrays) -> list[tuple[int, int]]:
    """Return pairs of interchangeable nodes.

    They have equal numbers, one value each of equal sizes for the same readers, and
    read the same values.
    """
    made, read = numbers.ends
    last: dict[object, int] = {}
    pairs = []
    for op in map(int, np.flatnonzero(numbers.is_movable)):
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
