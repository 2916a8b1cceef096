"""A program on one mesh: its priced model, folded, and the recipes' choices in it."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace

from rhino_jax.analysis.graph import Graph, Node, NodeKind
from rhino_jax.analysis.program_analysis import ProgramAnalysis
from rhino_jax.hardware.layout import lay_out
from rhino_jax.hardware.mesh import LaidMesh
from rhino_jax.model.build import build_model
from rhino_jax.model.neighbourhood import (
    MOST_CELLS,
    Seed,
    count_cells,
    groupings,
    neighbourhood,
    taken_together,
)
from rhino_jax.model.options import NodePin, OptionBuilder, Options
from rhino_jax.optimize.incumbents import EFFORTS, RECIPE_EFFORTS, Effort, Report
from rhino_jax.optimize.least_peak import least_possible, smallest_peak
from rhino_jax.optimize.problem import Labels
from rhino_jax.optimize.restricted import cheapest_restricted
from rhino_jax.optimize.restriction import Restrictions
from rhino_jax.optimize.solve import Solution, solve_overlapped
from rhino_jax.recipes.recipe_book import RecipeBook
from rhino_jax.recipes.recipes import Recipe, recipes_for
from rhino_jax.search.extract import overlap_of
from rhino_jax.search.records import MeshProblem, Request
from rhino_jax.search.symmetry import find_symmetry, marks_of
from rhino_jax.search.unfold import unfold


def build_mesh_problem(
    analysis: ProgramAnalysis,
    mesh_axes: Sequence[tuple[str, int]],
    request: Request,
) -> MeshProblem:
    """Enumerate and price the options on one mesh; recipes are left for later."""
    pinned = pinned_nodes(analysis.graph, request)
    laid = lay_out(analysis.target, mesh_axes)
    mesh = replace(laid, says_waypoints=request.density == "all")
    return replace(_draw_on(analysis, mesh, pinned, request), density=request.density)


def pinned_nodes(graph: Graph, request: Request) -> dict[int, NodePin]:
    """Node → what is pinned of it."""
    pinned: dict[int, NodePin] = {
        n.id: ((0, spec),)
        for n in graph.nodes
        for kind, pins in (
            (NodeKind.INPUT, request.pins),
            (NodeKind.OUTPUT, request.output_pins),
        )
        if n.kind is kind and (spec := pins.get(n.slot)) is not None
    }
    for value, pin in request.value_pins.items():
        port = graph.held.get(value)
        if port is not None:
            pinned[port.node] = (*pinned.get(port.node, ()), (port.result, pin.spec))
    return pinned


def _draw_on(
    analysis: ProgramAnalysis,
    mesh: LaidMesh,
    pinned: dict[int, NodePin],
    request: Request,
) -> MeshProblem:
    def narrow(builder: OptionBuilder, options: list[Options]) -> list[Options]:
        if len(mesh.long) <= 2 or count_cells(analysis.graph, options) <= MOST_CELLS:
            return options
        return neighbourhood(builder, options, _seeds(analysis, mesh, request))

    budget = request.memory_budget_bytes
    model = build_model(analysis, mesh, pinned, budget, narrow)
    overlap, book = overlap_of(model), RecipeBook.of(model)
    symmetry = find_symmetry(overlap, marks_of(book))
    folded = symmetry.overlap(overlap)
    return MeshProblem(model, overlap, book, symmetry, folded)


def _seeds(analysis: ProgramAnalysis, mesh: LaidMesh, request: Request) -> list[Seed]:
    """Plans of meshes in which axes are taken together: of each the best, and all
    recipes of the first. Pins are not kept there, since they may name one of them."""
    seeds: list[Seed] = []
    effort = replace(EFFORTS["fast"], seed=request.seed, deadline=request.deadline)
    for places in groupings(len(mesh.long)):
        groups = tuple(tuple(mesh.long[k] for k in group) for group in places)
        if seeds and time.monotonic() > request.deadline:
            break
        joined = taken_together(mesh, groups)
        mesh_problem = _draw_on(analysis, joined, {}, request)
        if not seeds:
            of_recipes = replace(RECIPE_EFFORTS["fast"], deadline=request.deadline)
            mesh_problem = with_recipes(mesh_problem, of_recipes)
            known = [x for x in mesh_problem.recipes.values() if x is not None]
            seeds += [Seed(mesh_problem.model, labels, groups) for labels in known]
        else:
            known = first_choices(mesh_problem)
        labels = solve_mesh_problem(mesh_problem, known, effort).labels
        if labels is not None:
            seeds.append(Seed(mesh_problem.model, labels, groups))
    return seeds


def solve_mesh_problem(
    mesh_problem: MeshProblem,
    starts: Sequence[Labels],
    effort: Effort,
    report: Report = lambda best, bound: None,
) -> Solution:
    """Search the folded problem, and the whole one where only that fits the limit.

    Args:
      mesh_problem: what to search.
      starts: known choices of all nodes.
      effort: limits.
      report: called with new best objectives and bounds.
    Returns:
      A choice of all nodes; None where nothing fits.
    """
    symmetry, whole = mesh_problem.symmetry, mesh_problem.overlap
    contracted = [symmetry.contract(s) for s in starts]
    found = solve_overlapped(mesh_problem.folded, contracted, effort, report)
    if symmetry.is_identity:
        return found
    unfolded = unfold(whole, symmetry, found, effort)
    if unfolded.labels is None and least_possible(whole.problem) <= whole.problem.limit:
        smallest = smallest_peak(whole.problem)
        if whole.problem.peak(smallest) <= whole.problem.limit:
            return solve_overlapped(whole, [smallest, *starts], effort, report)
    return replace(unfolded, nodes=(len(symmetry.classes), found.nodes[1]))


def with_recipes(
    mesh_problem: MeshProblem,
    effort: Effort,
    worth: float = math.inf,
    every: Sequence[Recipe] | None = None,
) -> MeshProblem:
    """The same with the cheapest plan within each recipe.

    Args:
      mesh_problem: what to search.
      effort, worth: as of `cheapest_restricted`.
      every: the recipes; by default all that the mesh allows.
    """
    if every is None:
        every = recipes_for(mesh_problem.model.mesh)
    recipes, left = _allowed(mesh_problem, every)
    found: dict[str, Labels | None] = {r.name: None for r in every}
    if left is not None:
        cheapest = cheapest_restricted(
            mesh_problem.folded.problem,
            left,
            _to_the_letter(mesh_problem, left),
            effort,
            worth,
        )
        for recipe, labels in zip(recipes, cheapest, strict=True):
            found[recipe.name] = mesh_problem.symmetry.expand(labels)
    is_cut = time.monotonic() > effort.deadline
    return replace(mesh_problem, recipes=found, is_cut=is_cut)


def first_choices(mesh_problem: MeshProblem) -> list[Labels]:
    """A choice of all nodes within every recipe, found without a search."""
    _, left = _allowed(mesh_problem, recipes_for(mesh_problem.model.mesh))
    if left is None:
        return []
    return [
        mesh_problem.symmetry.expand(left.expand(row, labels))
        for row, labels in enumerate(_to_the_letter(mesh_problem, left))
    ]


def _allowed(
    mesh_problem: MeshProblem, every: Sequence[Recipe]
) -> tuple[list[Recipe], Restrictions | None]:
    """The recipes that have a meaning, and what they leave the classes to choose."""
    recipes = [r for r in every if mesh_problem.book.allows(r)]
    return recipes, mesh_problem.book.restrict(
        recipes, _nodes(mesh_problem)
    ) if recipes else None


def _to_the_letter(mesh_problem: MeshProblem, left: Restrictions) -> Labels:
    """What recipes' names say: every class is cut by as many mesh axes as it may."""
    return mesh_problem.book.most_cut(_nodes(mesh_problem), left)


def _nodes(mesh_problem: MeshProblem) -> list[Node]:
    """The first of every class."""
    return [mesh_problem.model.graph.nodes[n] for n in mesh_problem.symmetry.first]
