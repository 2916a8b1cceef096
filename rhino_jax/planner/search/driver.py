"""The driver of the search: program and target in, plan out; and the plan of a program
with the smallest memory peak, whatever its step time.

Plans whose predicted step time is near the best one's are made for the compiler to
compare. The model's errors are mostly in the cost of communication, so in addition to
the recipes the runners-up are the best choices where communication is more and less
expensive than the model says. One recipe is annotated as people do it, around matmuls
only: where annotating every value misleads the compiler, that candidate shows it. And
beyond the requested number, data parallelism, ZeRO-1 and FSDP are always compiled as
most people write them: the chosen plan is then never slower, once compiled, than these.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

from rhino_jax.analysis.program_analysis import ProgramAnalysis
from rhino_jax.hardware.layout import lay_out
from rhino_jax.hardware.target import Target
from rhino_jax.ir.program import Program
from rhino_jax.plan.plan import PlanData
from rhino_jax.planner.search.compare import BoundAxes, Comparison
from rhino_jax.planner.search.folding import (
    chosen,
    first_choices,
    minimum_memory,
    solved_by,
    with_recipes,
)
from rhino_jax.planner.search.found import SearchResult, carried
from rhino_jax.planner.search.mesh_problem import build_mesh_problem
from rhino_jax.planner.search.passes import ANALYSE, INLINE, RECIPES, SOLVE
from rhino_jax.planner.search.read_back.assemble import assemble
from rhino_jax.planner.search.records import (
    LIMITS,
    MeshAxes,
    MeshProblem,
    PlanCandidate,
    Request,
    SolvedMesh,
)
from rhino_jax.recipes.recipes import Recipe, plain_recipes
from rhino_jax.solver.incumbents import EFFORTS, RECIPE_EFFORTS, Effort
from rhino_jax.solver.problem import Labels, PairTable
from rhino_jax.solver.solve import Solution, solve
from rhino_jax.utils.cache import Memo
from rhino_jax.utils.gc import no_garbage_collection


LIKE = replace(EFFORTS["fast"], max_rounds=0, max_fusions=0)
"""Effort for a program that is nearly another one: local search from that program's
solution and from recipes (from that solution alone: 3 % slower for a T5 of four times
the batch, with recipes 0.3 %, with ten rounds of messages 2 %)."""


@no_garbage_collection()
def find(
    program: Program,
    meshes: Sequence[MeshAxes],
    target: Target,
    request: Request,
    *,
    like: SearchResult | None = None,
    is_estimate: bool = False,
    bound_axes: BoundAxes | None = None,
) -> SearchResult:
    """Search a program on the best of several meshes, and read no plan back.

    Each mesh is searched briefly, the best one then with the requested level. Meshes of
    three and more axes are left out where the axis before gained little or the search
    would take long (`LIMITS.axis_gain`, `LIMITS.meshes_s`), which the notes say.

    Args:
      program: the program to plan.
      meshes: (name, size) of the axes of each candidate mesh.
      target: the hardware.
      request: the options of the search.
      like: the result of a program that is nearly the same; on its mesh alone, the
        search starts from there and from recipes.
      is_estimate: where there are several meshes, stop at their comparison and do not
        search the best one further; on the mesh of `like`, search locally, and prove
        nothing.
      bound_axes: see `Comparison`.
    """
    started = time.monotonic()
    request = request.begun(started)

    def result(
        solved: list[SolvedMesh],
        brief: SolvedMesh,
        compared: tuple[tuple[tuple[int, ...], float], ...] = (),
        notes: Sequence[str] = (),
    ) -> SearchResult:
        return SearchResult(solved, compared, notes, target, request, started, brief)

    watch = request.watch
    graph = INLINE.run(watch, program, **target.device.inlining)
    analysis = ANALYSE.run(watch, graph, target)
    # Reading the plan back takes about as long as the analysis.
    analysis_s = time.monotonic() - started
    within = replace(request, deadline=request.deadline - analysis_s)
    different = distinct_meshes(meshes, target)
    if len(meshes) == 1:
        mesh_problem = build_mesh_problem(analysis, different[0], within)
        starts = [] if within.has_recipes else first_choices(mesh_problem)
        is_like = like is not None and like.mesh_axes == tuple(different[0])
        if like and is_like:
            choice = carried(like.best, mesh_problem)
            starts = starts if choice is None else [choice, *starts]
        if is_like and is_estimate:
            one = brief = _solved(mesh_problem, within, starts, LIKE)
        else:
            one, brief = _at_level(mesh_problem, within, starts)
        return result([one], brief)
    comparison = Comparison(analysis, within, bound_axes=bound_axes)
    comparison.run(different)
    every, in_order = comparison.solved, comparison.in_order
    compared = brief = every[0]
    if not is_estimate and compared.solution.bound <= within.cutoff_s:
        every[0], brief = _at_level(
            compared.mesh_problem, within, [], compared.solution
        )
    return result(every, brief, in_order, comparison.notes())


@no_garbage_collection()
def search_again(found: SearchResult, request: Request) -> SearchResult:
    """Search the best mesh of a result again, under another request.

    The search starts from the known solution.

    Args:
      found: the result.
      request: must have the same pins; level, memory and limits may differ.
    """
    started = time.monotonic()
    request = request.begun(started)
    best = found.best
    mesh_problem = best.mesh_problem.within(request.memory_budget_bytes)
    before = best.solution
    starts = first_choices(mesh_problem) if before.labels is None else []
    solved, brief = _at_level(mesh_problem, request, starts, before)
    return replace(found, solved=[solved], brief=brief, request=request)


@no_garbage_collection()
def make_candidates(
    program: Program,
    meshes: Sequence[MeshAxes],
    target: Target,
    request: Request,
    count: int,
) -> tuple[PlanCandidate, ...]:
    """Return the plan of `find`'s result, and others of nearly its predicted step time,
    to be compiled.

    Args:
      program, meshes, target, request: see `find`.
      count: maximum number of plans, fewer where fewer differ; plain recipes, as most
        people write them, are added to these.
    """
    result = find(program, meshes, target, request)
    found, notes, request = result.solved, result.notes, result.request
    variants = [("best", found[0])]
    if found[0].solution.labels is not None and not request.is_over:
        model, effort = found[0].model, _recipe_effort(request)
        axes = [(a.name, a.size) for a in model.mesh.axes]
        annotated = build_mesh_problem(
            model.analysis, axes, replace(request, density="matmul")
        )
        plain = replace(annotated, density="batch")
        plain = with_recipes(plain, effort, every=plain_recipes(model.mesh))
        recipes, left_out = plain_of(found[0], plain)
        notes = [*notes, *left_out]
        if count > 1:
            annotated = with_recipes(annotated, effort)
            fast = replace(EFFORTS["fast"], deadline=request.deadline)
            variants = candidates_of(found, annotated, fast, count)
        variants = [*variants, *recipes]
    return tuple(
        PlanCandidate(name, replace(result, solved=[one], notes=notes).plan())
        for name, one in variants
    )


@no_garbage_collection()
def make_recipe_plans(
    program: Program,
    mesh_axes: MeshAxes,
    target: Target,
    request: Request,
) -> dict[str, PlanData | None]:
    """Return the best plan within each expert's recipe.

    Plans are returned whether they fit or not; None where the program does not allow a
    recipe. Each is the cheapest plan within the recipe under the request's density (all
    values, or those around matmuls); with density "batch" it is annotated as most
    people write it.
    """
    every = None
    if request.density == "batch":
        every = plain_recipes(lay_out(target, mesh_axes))
    solved = solve_recipes(program, mesh_axes, target, request, every)
    return plans_of_recipes(solved, target, request)


def solve_recipes(
    program: Program,
    mesh_axes: MeshAxes,
    target: Target,
    request: Request,
    every: Sequence[Recipe] | None,
) -> MeshProblem:
    """Return the problem of a mesh with recipes alone; see `with_recipes`."""
    analysis = ProgramAnalysis.of(program, target)
    mesh_problem = build_mesh_problem(analysis, mesh_axes, request)
    return with_recipes(mesh_problem, RECIPE_EFFORTS[request.level], every=every)


def plans_of_recipes(
    mesh_problem: MeshProblem, target: Target, request: Request
) -> dict[str, PlanData | None]:
    """Return a plan of every recipe of a problem; see `make_recipe_plans`."""
    started, recipes = time.monotonic(), mesh_problem.recipes
    return {
        name: None
        if labels is None
        else assemble(target, request, solved_by(mesh_problem, labels), started, ())
        for name, labels in recipes.items()
    }


def _at_level(
    mesh_problem: MeshProblem,
    request: Request,
    starts: Sequence[Labels],
    before: Solution | None = None,
) -> tuple[SolvedMesh, SolvedMesh]:
    """Search one mesh at the request's level.

    Level "best" starts from the result of level "fast", which is found as if that had
    been requested, or from `before` where that is proved to be as near to the optimum:
    it is never worse.

    Args:
      mesh_problem, request, starts, before: see `solve_on_mesh`.
    Returns:
      The result, and that of level "fast".
    """
    fast, is_fast = EFFORTS["fast"], request.level == "fast"
    is_known = before is not None and before.labels is not None
    if not is_fast and before and is_known and before.gap <= fast.near:
        brief = SolvedMesh(mesh_problem, before)
    else:
        watch = request.watch if is_fast else None
        asked = replace(request, level="fast", watch=watch)
        brief = _solved(mesh_problem, asked, starts, fast, before)
    if is_fast:
        return brief, brief
    effort, before = EFFORTS[request.level], brief.solution
    return _solved(mesh_problem, request, starts, effort, before), brief


def _solved(
    mesh_problem: MeshProblem,
    request: Request,
    starts: Sequence[Labels],
    effort: Effort,
    before: Solution | None = None,
) -> SolvedMesh:
    """Search one mesh from the recipes, where they are requested, and other choices."""
    watch = request.watch
    if request.has_recipes and not mesh_problem.recipes:
        mesh_problem = RECIPES.run(
            watch, mesh_problem, _recipe_effort(request), LIMITS.recipe_worth
        )
    return SOLVE.run(watch, mesh_problem, effort, request, starts, before)


def distinct_meshes(meshes: Sequence[MeshAxes], target: Target) -> list[MeshAxes]:
    """Drop meshes that differ from another only in the names of their axes: their plans
    are the same."""
    found: dict[frozenset[object], MeshAxes] = {}
    for axes in meshes:
        found.setdefault(lay_out(target, axes).signature, axes)
    return list(found.values())


def _recipe_effort(request: Request) -> Effort:
    """Return the effort for recipes, which leaves time for the search after them."""
    left = LIMITS.recipes_share * (request.deadline - time.monotonic())
    deadline = time.monotonic() + max(0.0, left)
    return replace(RECIPE_EFFORTS[request.level], deadline=deadline)


def find_minimum_memory(
    program: Program,
    meshes: Sequence[MeshAxes],
    target: Target,
    request: Request,
) -> SearchResult:
    """Return the choice with the smallest peak on each mesh, the smallest first.

    Args:
      program: the program to plan.
      meshes: (name, size) of the axes of each; where there are several, those of more
        than `LIMITS.minimum_axes` axes are left out.
      target: the hardware.
      request: pins; its memory budget is no limit here, and only says which values are
        too small to be counted (`CONSTANTS.small_share`).
    Returns:
      Choices of all nodes with their peaks, under no memory limit.
    """
    started = time.monotonic()
    graph = INLINE.run(None, program, **target.device.inlining)
    analysis = ANALYSE.run(None, graph, target)
    # Which values are too small to be counted depends on the budget; one above the
    # device's memory must not raise that threshold.
    budget = min(request.memory_budget_bytes, target.device.hbm_bytes)
    free = replace(request, memory_budget_bytes=budget, watch=None)
    every = distinct_meshes(meshes, target)
    short = [axes for axes in every if len(axes) <= LIMITS.minimum_axes]
    found: list[SolvedMesh] = []
    for axes in short or every[:1]:
        mesh_problem = build_mesh_problem(analysis, axes, free).within(math.inf)
        found.append(solved_by(mesh_problem, minimum_memory(mesh_problem)))
    found.sort(key=lambda one: one.solution.peak)
    unlimited = replace(free, memory_budget_bytes=math.inf)
    return SearchResult(found, (), [], target, unlimited, started)


Named = tuple[str, SolvedMesh]
"""The name of a candidate, and its choice."""


def candidates_of(
    found: Sequence[SolvedMesh], around_matmuls: MeshProblem, effort: Effort, count: int
) -> list[Named]:
    """Return the distinct choices with the shortest predicted steps, at most `count`.

    The best choice is first. The best recipe, annotated around matmuls only, follows
    wherever it fits, then the others by their predicted step.

    Args:
      found: the searched meshes, best first; there is a plan for the first.
      around_matmuls: the first mesh, with costs of programs that are annotated around
        matmuls only.
      effort: search effort for runners-up.
      count: maximum number of choices.
    """
    best = found[0]
    annotated = _recipes(replace(best, mesh_problem=around_matmuls), "@matmul")
    # The best choices where communication costs more, and less.
    symmetry, folded = best.mesh_problem.symmetry, best.mesh_problem.folded
    first: list[Named] = []
    for weight in LIMITS.communication_weights:
        problem, memo = folded.problem, Memo()
        costs = [
            compute + weight * (total - compute)
            for total, compute in zip(problem.costs, folded.compute.costs, strict=True)
        ]
        edges = [
            PairTable(e.source, e.target, memo.scaled(e.table, weight))
            for e in problem.edges
        ]
        problem = replace(problem, costs=costs, edges=edges)
        labels = solve(problem, [symmetry.contract(best.labels)], effort).labels
        if labels is None:
            continue  # It fits only if repeated nodes choose differently.
        name = "less communication" if weight > 1 else "more communication"
        first.append((name, chosen(best, symmetry.expand(labels))))
    for one in found[1:]:
        shape = "x".join(str(axis.size) for axis in one.model.mesh.axes)
        first.append((f"best on {shape}", one))
    others = sorted([*first, *_recipes(best)], key=_predicted_s)
    ranked = [("best", best), *annotated[:1], *others]
    return _distinct(c for c in ranked if c[1].solution.labels is not None)[:count]


def plain_of(best: SolvedMesh, plain: MeshProblem) -> tuple[list[Named], list[str]]:
    """Return the recipes, as mostly annotated, that may be faster once compiled.

    Args:
      best: the best solution.
      plain: its mesh, with plain recipes of density "batch".
    Returns:
      Recipes that fit and whose predicted step is within `LIMITS.prediction_error` of
        the best plan's, and notes on the others.
    """
    limit = (1 + LIMITS.prediction_error) * best.solution.objective
    recipes = _recipes(replace(best, mesh_problem=plain), "@batch")
    kept = _distinct(r for r in recipes if _predicted_s(r) <= limit)
    left_out = [
        f"{r[0]} ({_predicted_s(r) / best.solution.objective:.3g} times the plan)"
        for r in recipes
        if _predicted_s(r) > limit
    ]
    if not left_out:
        return kept, []
    error = f"{LIMITS.prediction_error:.0%}"
    note = (
        "recipes that were not compiled, since what they promise is slower by more than"
        f" the error of prediction, {error}: {', '.join(left_out)}."
    )
    return kept, [note]


def _predicted_s(candidate: Named) -> float:
    return candidate[1].solution.objective


def _distinct(every: Iterable[Named]) -> list[Named]:
    """Return the first of each choice on each mesh."""
    kept: dict[tuple[int, ...], Named] = {}
    for name, one in every:
        kept.setdefault((id(one.mesh_problem), *one.labels.tolist()), (name, one))
    return [*kept.values()]


def _recipes(found: SolvedMesh, suffix: str = "") -> list[Named]:
    """Return the recipes that fit, the fastest first."""
    problem = found.model.problem
    fitting = [
        (name + suffix, chosen(found, labels))
        for name, labels in found.mesh_problem.recipes.items()
        if labels is not None and problem.peak(labels) <= problem.limit
    ]
    return sorted(fitting, key=_predicted_s)
