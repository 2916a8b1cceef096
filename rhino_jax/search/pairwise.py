"""The problem without memory: reduce, pass messages, close the gap with CP-SAT."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from rhino_jax.search.cpsat import count_cells, solve_core
from rhino_jax.search.message_passing import Passing, pass_messages, value_of
from rhino_jax.search.pool import (
    FUSION_MODEL_CELLS,
    MAX_MODEL_CELLS,
    OPTIMAL_GAP,
    Effort,
)
from rhino_jax.search.problem import Labels, Problem
from rhino_jax.search.reduction import Core, eliminate, reduce, restrict


Choice = dict[int, int]
"""Node of the core → option."""


def solve_pairwise(
    problem: Problem, starts: Sequence[Labels], effort: Effort
) -> tuple[Labels, float, int, int]:
    """Ignore memory. Returns labels, bound, CP-SAT variables, nodes of the core."""
    core = reduce(problem)
    order = sorted(core.costs)
    known = [{i: int(s[i]) for i in order} for s in starts]
    first = {i: int(np.argmin(core.costs[i])) for i in order}
    passing = pass_messages(
        core,
        order,
        [*known, first],
        max_rounds=effort.max_rounds,
        tolerance=OPTIMAL_GAP / 10,
        deadline=effort.deadline,
    )
    # Constants left by removed nodes without neighbours.
    rest = sum(float(c.min()) for _, c, around in core.removed if not around)
    best, value, bound = passing.labels, passing.value, passing.bound
    met, variables = passing.met, 0

    def is_open() -> bool:
        return value - bound > OPTIMAL_GAP * (value + rest)

    for _ in range(effort.max_fusions):
        if not is_open() or time.monotonic() > effort.deadline:
            break
        fused, tried = _fuse(core, met, best, effort)
        variables = max(variables, tried)
        fused_value = value_of(core, fused)
        gain = value - fused_value
        if gain > 0:
            best, value = fused, fused_value
        if gain < OPTIMAL_GAP * (value + rest):
            break
        met = _widen(core, met, best)
    if is_open() and effort.deterministic_s:
        options = {i: np.flatnonzero(passing.alive[i]) for i in order}
        found = _close(core, options, best, value, effort, MAX_MODEL_CELLS)
        if found is not None:
            best, bound, tried = found[0], max(bound, min(found[1], value)), found[2]
            variables = max(variables, tried)
    return core.expand(best), bound + rest, variables, len(order)


def _fuse(
    core: Core, met: dict[int, np.ndarray], best: Choice, effort: Effort
) -> tuple[Choice, int]:
    """The best way to put together options that good choices used.

    With few options a node, messages soon settle, and CP-SAT decides what they
    leave open. Returns a choice and the number of CP-SAT variables.

    Source: fusion moves: Lempitsky, Rother, Roth, Blake, PAMI 32 (2010).
    """
    options = {i: np.flatnonzero(mask) for i, mask in met.items()}
    where = {i: {int(o): k for k, o in enumerate(x)} for i, x in options.items()}
    small = eliminate(restrict(core, options))
    order = sorted(small.costs)
    passing: Passing = pass_messages(
        small,
        order,
        [{i: where[i][best[i]] for i in order}],
        max_rounds=40,
        tolerance=OPTIMAL_GAP / 10,
        deadline=effort.deadline,
    )
    found, variables = passing.labels, 0
    if effort.deterministic_s and order:
        alive = {i: np.flatnonzero(passing.alive[i]) for i in order}
        closed = _close(small, alive, found, passing.value, effort, FUSION_MODEL_CELLS)
        if closed is not None:
            found, variables = closed[0], closed[2]
    local = small.expand(found)
    return {i: int(options[i][local[i]]) for i in core.costs}, variables


def _widen(
    core: Core, met: dict[int, np.ndarray], best: Choice, most: int = 4
) -> dict[int, np.ndarray]:
    """Let in, at every node, the options that fit best beside the rest of a choice."""
    wider = {}
    for i, mask in met.items():
        total = core.costs[i]
        for j, table in core.tables[i].items():
            total = total + table[:, best[j]]
        wider[i] = mask.copy()
        wider[i][np.argsort(total, kind="stable")[:most]] = True
    return wider


def _close(
    core: Core,
    options: dict[int, np.ndarray],
    best: Choice,
    value: float,
    effort: Effort,
    max_cells: int,
) -> tuple[Choice, float, int] | None:
    """CP-SAT over what message passing left open: a choice, a bound over these
    options, and the number of variables; None where the model would be too large."""
    if count_cells(core, options) > max_cells:
        return None
    answer = solve_core(
        core,
        options,
        best,
        value,
        deterministic_s=effort.deterministic_s,
        wall_s=max(0.1, min(60.0, effort.deadline - time.monotonic())),
        seed=effort.seed,
    )
    found = best
    if answer.labels is not None and value_of(core, answer.labels) < value:
        found = answer.labels
    # CP-SAT counts in whole units: its optimum is one to a part in a million.
    proved = value_of(core, found) * (1 - 1e-6) if answer.is_optimal else answer.bound
    return found, proved, answer.variables
