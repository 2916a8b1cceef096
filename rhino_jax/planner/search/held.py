"""The problem of a mesh with other pins than it was solved with, solved again."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import numpy as np

from rhino_jax.model.build import MeshModel
from rhino_jax.planner.search.found import SearchResult
from rhino_jax.planner.search.mesh_problem import build_mesh_problem
from rhino_jax.planner.search.passes import SOLVE
from rhino_jax.planner.search.records import Progress, Request
from rhino_jax.solver.incumbents import EFFORTS, Effort
from rhino_jax.solver.problem import Labels
from rhino_jax.utils.gc import no_garbage_collection


@no_garbage_collection()
def search_held(
    found: SearchResult,
    request: Request,
    *,
    effort: Effort | None = None,
    progress: Progress | None = None,
) -> SearchResult:
    """The best mesh of what was found, with other pins or another budget.

    The program is not analysed again, and the search starts from the plan that there
    is. Recipes are not searched.

    Args:
      found: of the same program.
      request: its pins take the place of those of before.
      effort: limits; by default those of the request's level.
    Raises:
      PinError: an op cannot make what is pinned.
    """
    started = time.monotonic()
    deadline = started + (request.time_limit_s or math.inf)
    request = replace(request, deadline=min(request.deadline, deadline))
    best = found.solved[0]
    before = best.mesh_problem.model
    mesh_problem = build_mesh_problem(before.analysis, found.mesh_axes, request)
    starts: list[Labels] = []
    known = best.solution.labels
    if known is not None:
        starts = [carried_over(before, mesh_problem.model, known)]
    solved = SOLVE.run(
        request.watch,
        mesh_problem,
        effort or EFFORTS[request.level],
        request,
        progress,
        starts,
    )
    return replace(
        found, solved=[solved], compared=(), request=request, started=started
    )


def carried_over(before: MeshModel, after: MeshModel, labels: Labels) -> Labels:
    """A choice of one model in another of the same program and mesh: each node keeps
    its strategy where it has it, and else takes what is cheapest beside the others."""
    chosen = np.zeros(len(labels), dtype=np.int64)
    # Equal nodes share one object of options.
    places: dict[int, dict[object, int]] = {}
    lost: list[int] = []
    for n, label in enumerate(labels.tolist()):
        old, new = before.options[n], after.options[n]
        if old.strategies is new.strategies:
            chosen[n] = label
            continue
        place = places.get(id(new))
        if place is None:
            place = places[id(new)] = {s: k for k, s in enumerate(new.strategies)}
        kept = place.get(old.strategies[label])
        if kept is None:
            lost.append(n)
        else:
            chosen[n] = kept
    if not lost:
        return chosen
    problem, around = after.problem, set(lost)
    costs = {n: problem.costs[n].astype(float).copy() for n in lost}
    for edge in problem.edges:
        if edge.source in around:
            costs[edge.source] += edge.table[:, chosen[edge.target]]
        if edge.target in around:
            costs[edge.target] += edge.table[chosen[edge.source], :]
    for n in lost:
        chosen[n] = int(costs[n].argmin())
    return chosen
