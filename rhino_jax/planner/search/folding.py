"""The problem of one mesh: repeated structure, such as the layers of a model, solved
once; the recipes' choices in it; and its search under the request's limits.

One node represents all equivalent nodes in equivalent surroundings (`symmetry`). Nodes
of one orbit save memory all or none: where half of the layers would have to save, all
do. There, choices of the orbits that are cheapest at the best Lagrange multipliers of
memory, of which some fit and some do not, are merged node by node (`unfold`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rhino_jax.model.build import MeshModel
from rhino_jax.planner.search.read_back.extract import overlap_of
from rhino_jax.planner.search.records import LIMITS, MeshProblem, Request, SolvedMesh
from rhino_jax.planner.search.symmetry import Symmetry, find_symmetry, marks_of
from rhino_jax.recipes.recipe_book import RecipeBook
from rhino_jax.recipes.recipes import Recipe, recipes_for
from rhino_jax.solver.incumbents import Effort, Report
from rhino_jax.solver.least_peak import least_possible, minimum_peak, smallest_peak
from rhino_jax.solver.memory_search import LONG_ROUNDS
from rhino_jax.solver.moves.fusion import fuse
from rhino_jax.solver.overlap import Overlap, descend
from rhino_jax.solver.pairwise import solve_pairwise
from rhino_jax.solver.problem import Labels
from rhino_jax.solver.restricted import Restrictions, cheapest_restricted
from rhino_jax.solver.solve import Solution, solve_overlapped


def with_recipes(
    mesh_problem: MeshProblem,
    effort: Effort,
    worth: float = math.inf,
    every: Sequence[Recipe] | None = None,
) -> MeshProblem:
    """Return the problem with the cheapest plan within each recipe.

    Args:
      mesh_problem: the problem.
      effort, worth: see `cheapest_restricted`.
      every: the recipes; None: all that the mesh allows.
    """
    if every is None:
        every = recipes_for(mesh_problem.model.mesh)
    recipes, left = _allowed(mesh_problem, every)
    # Most programs have no experts, and say nothing of recipes for them.
    found: dict[str, Labels | None] = {r.name: None for r in every if not r.experts}
    if left is not None:
        cheapest = cheapest_restricted(
            mesh_problem.folded.problem,
            left,
            mesh_problem.most_cut(left),
            effort,
            worth,
        )
        for recipe, labels in zip(recipes, cheapest, strict=True):
            found[recipe.name] = mesh_problem.symmetry.expand(labels)
    is_cut = time.monotonic() > effort.deadline
    return replace(mesh_problem, recipes=found, is_cut=is_cut)


def first_choices(mesh_problem: MeshProblem) -> list[Labels]:
    """Return one choice of all nodes within each recipe, found without a search."""
    _, left = _allowed(mesh_problem, recipes_for(mesh_problem.model.mesh))
    if left is None:
        return []
    return [
        mesh_problem.symmetry.expand(left.expand(row, labels))
        for row, labels in enumerate(mesh_problem.most_cut(left))
    ]


def _allowed(
    mesh_problem: MeshProblem, every: Sequence[Recipe]
) -> tuple[list[Recipe], Restrictions | None]:
    """Return the recipes that apply to the program, and the options that they leave
    each orbit; None where no recipe applies."""
    recipes = [r for r in every if mesh_problem.book.allows(r)]
    if not recipes:
        return [], None
    return recipes, mesh_problem.book.restrict(recipes, mesh_problem.firsts)


def fold(model: MeshModel, density: str) -> MeshProblem:
    """Return the problem of a model, folded where a search of all nodes would take
    long; recipes are left for later.

    Args:
      model: the cost model on one mesh.
      density: see `Request`.
    """
    overlap, book = overlap_of(model), RecipeBook.of(model)
    if LIMITS.search_s(overlap.problem) <= LIMITS.unfolded_s:
        symmetry = Symmetry.none(len(model.options))
    else:
        symmetry = find_symmetry(overlap, marks_of(book))
    folded = symmetry.overlap(overlap)
    return MeshProblem(model, overlap, book, symmetry, folded, density=density)


def solve_mesh_problem(
    mesh_problem: MeshProblem,
    starts: Sequence[Labels],
    effort: Effort,
    report: Report = lambda best, bound: None,
    before: Solution | None = None,
) -> Solution:
    """Search the folded problem, and the unfolded one where only that fits the limit.

    Args:
      mesh_problem: the problem.
      starts: known choices of all nodes; the result is no worse than the best of them
        that fits.
      effort: limits of the search.
      report: called with new best objectives and bounds, in seconds.
      before: the result of a search of the same problem: see `solve_overlapped`.
    Returns:
      A choice of all nodes; its labels are None where nothing fits.
    """
    symmetry, whole = mesh_problem.symmetry, mesh_problem.overlap
    contracted = [symmetry.contract(s) for s in starts]
    found = solve_overlapped(mesh_problem.folded, contracted, effort, report, before)
    if symmetry.is_identity:
        return found
    best, problem = unfold(whole, symmetry, found, effort), whole.problem
    if best.labels is None and least_possible(problem) <= problem.limit:
        smallest = smallest_peak(problem)
        if problem.peak(smallest) <= problem.limit:
            return solve_overlapped(whole, [smallest, *starts], effort, report)
    for start in starts:
        # The folded problem cannot express starts in which repeated nodes choose
        # differently.
        if np.array_equal(symmetry.expand(symmetry.contract(start)), start):
            continue
        objective, peak = whole.step_s(start), problem.peak(start)
        if objective < best.objective and peak <= problem.limit:
            best = replace(
                best,
                labels=start,
                objective=objective,
                bound=min(best.bound, objective),
                peak=peak,
                lowest_peak=min(best.lowest_peak, peak),
                unfit=None,
            )
    return replace(best, nodes=(len(symmetry.orbits), found.nodes[1]))


def unfold(
    whole: Overlap, symmetry: Symmetry, found: Solution, effort: Effort
) -> Solution:
    """Return the solution of all nodes: the orbits' solution expanded, or a better one.

    Its bound is that of plans in which repeated nodes share a choice, unless the
    solution is below it.

    Args:
      whole: the problem of all nodes.
      symmetry: their orbits.
      found: the solution of the orbits, of which none may fit.
      effort: limits of the search.
    """
    known = None if found.labels is None else symmetry.expand(found.labels)
    tied = replace(found, labels=known)
    is_over = known is not None and time.monotonic() > effort.deadline
    if found.dual is None or not effort.max_fusions or is_over:
        return tied
    near = [symmetry.expand(choice) for choice in found.dual.choices]
    weighted = whole.weighted(found.dual.prices.weight)
    fused = fuse(weighted, known, near, effort)
    if fused.labels is None:
        return tied
    labels = descend(whole, fused.labels)
    objective, peak = whole.step_s(labels), whole.problem.peak(labels)
    if objective >= found.objective:
        return tied
    bound = found.bound
    if objective <= bound:
        # The bound on plans in which repeated nodes share a choice does not hold here.
        rounds, prices = min(effort.max_rounds, LONG_ROUNDS), found.dual.prices
        brief = replace(effort, max_rounds=rounds, max_fusions=0, deterministic_s=0.0)
        priced = whole.weighted(prices.weight).priced(prices.memory)
        least = solve_pairwise(priced, [labels], brief).bound
        bound = min(least - prices.paid(whole.problem.limit), objective)
    return replace(
        tied,
        labels=labels,
        objective=objective,
        bound=bound,
        peak=peak,
        lowest_peak=min(found.lowest_peak, peak),
        variables=max(found.variables, fused.variables),
    )


def minimum_memory(mesh_problem: MeshProblem) -> Labels:
    """Return the choice of all nodes with the smallest peak that is found.

    Args:
      mesh_problem: the problem; its memory limit has no influence.
    """
    symmetry, whole = mesh_problem.symmetry, mesh_problem.model.problem
    worth = 1 + LIMITS.unlike_gain
    alike = symmetry.expand(minimum_peak(mesh_problem.folded.problem))
    if symmetry.is_identity or whole.peak(alike) <= worth * least_possible(whole):
        return alike
    return min([alike, minimum_peak(whole)], key=whole.peak)


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
            best = min(fitting, key=mesh_problem.overlap.step_s)
            return replace(solved_by(mesh_problem, best), is_fallback=True)
    effort = replace(
        effort,
        deadline=request.deadline,
        seed=request.seed,
        cutoff_s=min(effort.cutoff_s, request.cutoff_s),
    )
    report = request.progress or (lambda best, bound: None)
    solution = solve_mesh_problem(mesh_problem, known, effort, report, before)
    return SolvedMesh(mesh_problem, solution, is_cut=request.is_over)


def solved_by(mesh_problem: MeshProblem, labels: Labels) -> SolvedMesh:
    """Return a known choice as a solution with no proved bound."""
    overlap, count = mesh_problem.overlap, len(labels)
    objective, peak = overlap.step_s(labels), overlap.problem.peak(labels)
    solution = Solution(labels, objective, 0.0, peak, peak, 0, (count, count))
    return SolvedMesh(mesh_problem, solution)


def chosen(found: SolvedMesh, labels: Labels) -> SolvedMesh:
    """Return another choice in the same model, under the same bound."""
    overlap = found.mesh_problem.overlap
    peak = overlap.problem.peak(labels)
    solution = replace(
        found.solution, labels=labels, objective=overlap.step_s(labels), peak=peak
    )
    return replace(found, solution=solution)
