"""An expert's recipe at its best, as a plan."""

from __future__ import annotations

from dataclasses import replace

from rhino_jax.errors import RhinoError, nearest
from rhino_jax.plan.plan import PlanData
from rhino_jax.planner.search.found import SearchResult
from rhino_jax.planner.search.passes import RECIPES
from rhino_jax.planner.search.read_back.assemble import assemble
from rhino_jax.planner.search.records import MeshProblem, Request, SolvedMesh
from rhino_jax.planner.search.solve_on_mesh import as_solution
from rhino_jax.recipes.recipes import recipes_for
from rhino_jax.solver.incumbents import RECIPE_EFFORTS
from rhino_jax.units import format_bytes


def plan_of_recipe(found: SearchResult, request: Request, name: str) -> PlanData:
    """Return an expert's recipe as a plan on the searched mesh, whether it fits or not.

    Args:
      found: the search result of the plan's mesh.
      request: options of the search.
      name: name of the recipe.

    Raises:
      RhinoError: there is no such recipe, or the program does not allow it.
    """
    problem = found.solved[0].mesh_problem
    known = [r.name for r in recipes_for(problem.model.mesh)]
    if name not in known:
        raise RhinoError(
            f"`plan.recipe`: there is no recipe {name!r} here."
            + nearest(name, known or ["dp"]),
            where=f"plan.recipe({name!r})",
            numbers=f"on this mesh: {', '.join(known) or 'none, it has one device'}",
            fix=f"take one of them, as plan.recipe({known[0]!r})."
            if known
            else "plan for several devices.",
        )
    problem = _with_recipe(problem, request, name)
    labels = problem.recipes[name]
    if labels is None:
        raise RhinoError(
            f"`plan.recipe`: the program has nothing that {name!r} could cut.",
            where=f"the plan of `{problem.model.graph.program.name}`",
            numbers="it needs a batch, and what else its name says: matmuls whose inner"
            " dims divide, parameters or state, a sequence",
            fix="take another recipe; plan.recipes has None for those that are none.",
        )
    solution = as_solution(problem, labels)
    plan = assemble(
        found.target, request, SolvedMesh(problem, solution), found.started, ()
    )
    # The bound is that of the search; nothing was proved about the recipe.
    note = f"this is the recipe {name!r} at its best, not the best plan."
    if solution.peak > request.memory_budget_bytes:
        note += (
            f" It does not fit: {format_bytes(solution.peak)} of"
            f" {format_bytes(request.memory_budget_bytes)} per device."
        )
    search = replace(plan.search, status="recipe")
    return replace(plan, search=search, notes=(*plan.notes, note))


def _with_recipe(problem: MeshProblem, request: Request, name: str) -> MeshProblem:
    """Return the problem with the recipe's solution; solve it only if it is missing."""
    if problem.recipes.get(name) is not None:
        return problem
    every = [r for r in recipes_for(problem.model.mesh) if r.name == name]
    effort = replace(RECIPE_EFFORTS[request.level], deadline=request.deadline)
    return RECIPES.run(request.watch, problem, effort, every=every)
