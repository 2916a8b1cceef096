"""The problem of a mesh, solved again with other pins."""

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
    """Solve the best mesh of a result with other pins or another budget.

    The program is not analysed again, and the search starts from the known solution.
    Recipes are not searched.

    Args:
      found: a result of the same program.
      request: its pins replace those of the result.
      effort: limits of the search; None: those of the request's level.
      progress: called with new best objectives and bounds, in seconds.
    Raises:
      PinError: an op cannot produce what is pinned.
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
    """Map labels of one model to another of the same program and mesh: each node keeps
    its strategy where it exists, and else takes the cheapest one given the others."""
    chosen = np.zeros(len(labels), dtype=np.int64)
    # Nodes with equal options share one object.
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
