"""The CP-SAT model of what message passing left open.

Variables   x[i, o]      node i takes option o                    `_add_nodes`
            e[ij, p, q]  edge ij runs from class p to class q      `_add_edges`
Subject to  Σ_o x[i, o] = 1
            Σ_q e[ij, p, q] = Σ_{o in p} x[i, o], and likewise for q
            Σ usage at t ≤ limit, for the times given              `_add_memory`
Minimise    Σ cost·x + Σ table·e, in whole units of `unit`

A class is a set of options of one node that the edge cannot tell apart. The
equalities are the local polytope, whose LP relaxation is tight on trees.

Source: Werner, "A linear programming approach to max-sum problem: a review",
PAMI 29 (2007), section 3.1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from ortools.sat.python import cp_model

from rhino_jax.optimize.presolve.reduction import Core, unique_columns
from rhino_jax.optimize.problem import Problem


KIB = 1024
"""Memory rows are in whole KiB, usages rounded up, so that a solution that the
model accepts fits for certain."""


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """Attributes:
    labels: node → option, or None where no better choice was found.
    bound: proved lower bound on the objective, in its own unit.
    is_optimal: nothing better exists among the options given.
    variables: Boolean variables of the model.
    """

    labels: dict[int, int] | None
    bound: float
    is_optimal: bool
    variables: int


@dataclass(slots=True, eq=False)
class _Model:
    core: Core
    options: dict[int, np.ndarray]
    unit: float
    model: cp_model.CpModel = field(default_factory=cp_model.CpModel)
    x: dict[int, list[cp_model.IntVar]] = field(default_factory=dict)
    terms: list[cp_model.IntVar] = field(default_factory=list)
    weights: list[int] = field(default_factory=list)
    hints: dict[int, int] = field(default_factory=dict)


def count_cells(core: Core, options: dict[int, np.ndarray]) -> int:
    """How many edge variables a model with these options would have at most."""
    return sum(
        len(options[i]) * len(options[j])
        for i, around in core.tables.items()
        for j in around
        if i < j
    )


def solve_core(
    core: Core,
    options: dict[int, np.ndarray],
    hint: dict[int, int],
    upper: float,
    *,
    memory: Problem | None = None,
    times: tuple[int, ...] = (),
    deterministic_s: float = 4.0,
    wall_s: float = 60.0,
    near: float = 1e-6,
    seed: int = 0,
) -> Answer:
    """Solve the core restricted to `options`, hinting a known choice.

    Args:
      core: pairwise problem.
      options: node → indices of the options it may take.
      hint: a known choice; need not be feasible.
      upper: objective of the best known feasible choice (inf where none is).
      memory: the problem whose usages hold; all its nodes with usage that varies
        must be in the core.
      times: the times at which the limit is enforced.
      deterministic_s: CP-SAT's deterministic time limit, the same on every host.
      wall_s: wall-clock limit on top of it.
      near: share of the objective at which a choice is as good as the bound.
      seed: random seed.
    """
    scale = _spread(core, options)
    # Where a choice costs nothing at all, it says nothing of the others' scale.
    if upper > 0:
        scale = min(upper, scale)
    unit = max(scale, 1e-30) / 1e9
    m = _Model(core, options, unit)
    _add_nodes(m, hint)
    _add_edges(m, hint)
    if memory is not None:
        _add_memory(m, memory, times)
    m.model.minimize(cp_model.LinearExpr.weighted_sum(m.terms, m.weights))
    for index, value in m.hints.items():
        m.model.add_hint(m.model.get_bool_var_from_proto_index(index), value)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = seed
    solver.parameters.max_deterministic_time = deterministic_s
    solver.parameters.max_time_in_seconds = wall_s
    solver.parameters.linearization_level = 2
    solver.parameters.relative_gap_limit = near
    status = solver.solve(m.model)
    variables = len(m.model.proto.variables)
    bound = solver.best_objective_bound * unit
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        infeasible = status == cp_model.INFEASIBLE
        return Answer(None, math.inf if infeasible else bound, infeasible, variables)
    labels = {
        i: int(options[i][next(k for k, v in enumerate(xs) if solver.value(v))])
        for i, xs in m.x.items()
    }
    return Answer(labels, bound, status == cp_model.OPTIMAL, variables)


def _spread(core: Core, options: dict[int, np.ndarray]) -> float:
    total = sum(float(np.abs(c[options[i]]).max()) for i, c in core.costs.items())
    for i, around in core.tables.items():
        for j, table in around.items():
            if i < j:
                total += float(np.abs(table[np.ix_(options[i], options[j])]).max())
    return total


def _add_nodes(m: _Model, hint: dict[int, int]) -> None:
    for i, options in m.options.items():
        xs = [m.model.new_bool_var("") for _ in options]
        m.x[i] = xs
        m.model.add_exactly_one(xs)
        for option, var in zip(options, xs, strict=True):
            _charge(m, var, float(m.core.costs[i][option]))
            m.hints[var.index] = int(hint.get(i) == option)


def _charge(m: _Model, var: cp_model.IntVar, cost: float) -> None:
    weight = round(cost / m.unit)
    if weight:
        m.terms.append(var)
        m.weights.append(weight)


def _add_edges(m: _Model, hint: dict[int, int]) -> None:
    for i, around in m.core.tables.items():
        for j, table in around.items():
            if i < j:
                local = table[np.ix_(m.options[i], m.options[j])]
                _add_pair(m, i, j, local, hint)


def _add_pair(
    m: _Model, i: int, j: int, table: np.ndarray, hint: dict[int, int]
) -> list[list[cp_model.IntVar]]:
    """Cells of one edge, over classes; returns them as [class of i][class of j]."""
    if np.ptp(table) == 0 and table.flat[0] == 0:
        return []
    columns, j_class = unique_columns(table)
    rows, i_class = unique_columns(columns.T)
    small = rows.T
    hint_i = _class_of(m, i, i_class, hint)
    hint_j = _class_of(m, j, j_class, hint)
    cells = []
    for p in range(small.shape[0]):
        line = []
        for q in range(small.shape[1]):
            var = m.model.new_bool_var("")
            _charge(m, var, float(small[p, q]))
            m.hints[var.index] = int(p == hint_i and q == hint_j)
            line.append(var)
        cells.append(line)
        members = [v for v, c in zip(m.x[i], i_class, strict=True) if c == p]
        m.model.add(sum(line) == sum(members))
    for q in range(small.shape[1]):
        members = [v for v, c in zip(m.x[j], j_class, strict=True) if c == q]
        m.model.add(sum(line[q] for line in cells) == sum(members))
    return cells


def _class_of(m: _Model, i: int, classes: np.ndarray, hint: dict[int, int]) -> int:
    where = np.flatnonzero(m.options[i] == hint.get(i, -1))
    return int(classes[where[0]]) if len(where) else -1


def _add_memory(m: _Model, problem: Problem, times: tuple[int, ...]) -> None:
    rows: dict[int, list[tuple[cp_model.IntVar, int]]] = {t: [] for t in times}
    fixed = dict.fromkeys(times, 0)
    for u in problem.node_usages:
        live = [t for t in times if u.start <= t < u.stop]
        if not live:
            continue
        if u.node not in m.x:
            extra = math.ceil(float(u.usage.max()) / KIB)
            for t in live:
                fixed[t] += extra
            continue
        for option, var in zip(m.options[u.node], m.x[u.node], strict=True):
            amount = math.ceil(float(u.usage[option]) / KIB)
            for t in live:
                rows[t].append((var, amount))
    for e in problem.edge_usages:
        live = [t for t in times if e.start <= t < e.stop]
        if live:
            _add_edge_memory(m, e.source, e.target, e.usage, live, rows)
    limit = math.floor(problem.limit / KIB)
    for t in times:
        if rows[t]:
            variables = [v for v, _ in rows[t]]
            amounts = [a for _, a in rows[t]]
            m.model.add(
                cp_model.LinearExpr.weighted_sum(variables, amounts) <= limit - fixed[t]
            )


def _add_edge_memory(
    m: _Model,
    i: int,
    j: int,
    usage: np.ndarray,
    live: list[int],
    rows: dict[int, list[tuple[cp_model.IntVar, int]]],
) -> None:
    if not usage.any():
        return
    local = usage[np.ix_(m.options[i], m.options[j])]
    for q, option_var in enumerate(m.x[j]):
        # One amount per option of the reader and pair of equal rows.
        for amount in np.unique(local[:, q]):
            if amount <= 0:
                continue
            sources = [m.x[i][p] for p in np.flatnonzero(local[:, q] == amount)]
            if len(sources) == len(m.x[i]):
                var = option_var
            else:
                var = m.model.new_bool_var("")
                m.model.add(var >= option_var + sum(sources) - 1)
            for t in live:
                rows[t].append((var, math.ceil(float(amount) / KIB)))
