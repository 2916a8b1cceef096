"""The problem of one mesh, solved under the request's limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rhino_jax.planner.search.folding import solve_mesh_problem
from rhino_jax.planner.search.records import MeshProblem, Request, SolvedMesh
from rhino_jax.solver.incumbents import Effort
from rhino_jax.solver.problem import Labels
from rhino_jax.solver.solve import Solution


def solve_on_mesh(
    mesh_problem: MeshProblem,
    effort: Effort,
    request: Request,
    starts: Sequence[Labels] = (),
    before: Solution | None = None,
) -> SolvedMesh:
    """Search from the recipes and other known choices.

    Args:
      mesh_problem: the problem.
      effort, request: limits of the search, and its report.
      starts: known choices of all nodes.
      before: the result of a search of the same problem, which this one continues.
    """
    problem = mesh_problem.model.problem
    known = [*starts, *(x for x in mesh_problem.recipes.values() if x is not None)]
    if before is not None and before.labels is not None:
        known.insert(0, before.labels)
    if request.is_over:
        fitting = [s for s in known if problem.peak(s) <= problem.limit]
        if fitting:
            best = as_solution(
                mesh_problem, min(fitting, key=mesh_problem.overlap.step_s)
            )
            return SolvedMesh(mesh_problem, best, is_fallback=True)
    effort = replace(
        effort,
        deadline=request.deadline,
        seed=request.seed,
        cutoff_s=min(effort.cutoff_s, request.cutoff_s),
    )
    report = request.progress or (lambda best, bound: None)
    solution = solve_mesh_problem(mesh_problem, known, effort, report, before)
    return SolvedMesh(mesh_problem, solution, is_cut=request.is_over)


def as_solution(mesh_problem: MeshProblem, labels: Labels) -> Solution:
    """Return a known choice as a solution with no proved bound."""
    peak, count = (
        mesh_problem.model.problem.peak(labels),
        len(mesh_problem.model.graph.nodes),
    )
    objective = mesh_problem.overlap.step_s(labels)
    return Solution(labels, objective, 0.0, peak, peak, 0, (count, count))
