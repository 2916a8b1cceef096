"""Answers about a plan from the problem that gave it: reasons, recipes, worth."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rhino_jax.errors import RhinoError, StageError, nearest
from rhino_jax.explain.explaining import View, explain
from rhino_jax.explain.in_stages import PipelineView, StagedQuestion, moved
from rhino_jax.explain.place import steps_held
from rhino_jax.explain.why import Why
from rhino_jax.ir.spec import Spec
from rhino_jax.plan.plan import PlanData
from rhino_jax.planner.origin import PlanOrigin
from rhino_jax.planner.search.folding import as_solution
from rhino_jax.planner.search.found import SearchResult
from rhino_jax.planner.search.passes import RECIPES
from rhino_jax.planner.search.read_back.assemble import assemble
from rhino_jax.planner.search.records import MeshProblem, Request, SolvedMesh
from rhino_jax.planner.variant_search import Search
from rhino_jax.recipes.recipes import recipes_for
from rhino_jax.solver.incumbents import RECIPE_EFFORTS
from rhino_jax.units import format_bytes
from rhino_jax.utils.progress import shown


def why(plan: PlanData, key: str, spec: Any = None) -> Why:
    """Explain the layout of a value; see `Plan.why` and `Plan.why_not`.

    Args:
      plan: a plan with an origin.
      key: key of the value.
      spec: the only alternative to evaluate; None: all.
    """
    origin: PlanOrigin = plan.origin
    if plan.has_tasks:
        return _why_in_stages(origin, plan, key, spec)
    solved = origin.solved_for(plan)
    request = _now(solved.search).request
    view = PipelineView(solved) if plan.is_one_program else View()
    with shown(origin.plan_options.progress) as report:
        return explain(solved.found, request, plan, key, spec, report, view)


def _why_in_stages(origin: PlanOrigin, plan: PlanData, key: str, spec: Any) -> Why:
    if type(spec) is int:
        started = time.monotonic()
        other = origin.with_(plan, {"pins": {key: spec}})
        return moved(plan, key, spec, other, time.monotonic() - started)
    plan_options, pins = (
        origin.plan_options,
        origin.stage_pins(origin.plan_options, plan),
    )
    solved, program = origin.solved_for(plan), origin.traced.program
    return StagedQuestion(solved, program, plan_options.level, pins).why(key, spec)


def worth_of(plan: PlanData, held: Mapping[str, Spec]) -> dict[str, float]:
    """Return the change of the step time, in seconds, with one argument fixed to
    another layout and everything else solved again; one entry for each path, each on
    its own.

    Args:
      plan: a plan with an origin.
      held: tree path of an argument → its other layout.
    """
    origin: PlanOrigin = plan.origin
    solved = origin.solved_for(plan)
    with shown(origin.plan_options.progress) as report:
        return steps_held(solved.found, _now(solved.search).request, held, report)


def recipe(plan: PlanData, name: str) -> PlanData:
    """Return an expert's recipe at its best, as a plan; see `Plan.recipe`.

    Raises:
      StageError: the plan has several stages.
      RhinoError: there is no such recipe, or the program does not allow it.
    """
    origin: PlanOrigin = plan.origin
    if not plan.is_one_mesh:
        raise StageError(
            "`plan.recipe`: a plan of several stages cannot be asked.",
            where=f"the plan of `{plan.program_name}`",
            numbers=f"{plan.num_stages} stages, schedule {plan.schedule!r}",
            fix="ask the plan of one: plan.with_(stages=1, mesh=…), on a mesh without"
            " the axis `stage`."
            + " `plan.code('specs')` says what each stage holds, and how."
            * plan.is_one_program,
        )
    solved = origin.solved_for(plan)
    search = _now(solved.recipes.search)
    found = plan_of_recipe(solved.recipes.found, search.request, name)
    return origin.finished(search.told(found), plan, origin.plan_options, None)


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
            f"`plan.recipe`: the program has nothing that {name!r} could shard.",
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


def _now(search: Search) -> Search:
    """Return the search with its time limit counted from now."""
    limit = search.request.time_limit_s or math.inf
    return search.asking(deadline=time.monotonic() + limit)
