"""A program on one mesh: its priced model, folded, and the recipes' choices in it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from rhino_jax.hardware.layout import lay_out
from rhino_jax.hardware.mesh import LaidMesh
from rhino_jax.ir.spec import Spec
from rhino_jax.search.build import build_model
from rhino_jax.search.extract import overlap_of
from rhino_jax.search.folding import find_folding, marks_of
from rhino_jax.search.graph import NodeKind
from rhino_jax.search.least_peak import least_possible, smallest_peak
from rhino_jax.search.near import (
    MOST_CELLS,
    Seed,
    count_cells,
    groupings,
    near,
    taken_together,
)
from rhino_jax.search.options import OptionBuilder, Options
from rhino_jax.search.pool import EFFORTS, RECIPE_EFFORTS, Effort, Report
from rhino_jax.search.problem import Labels
from rhino_jax.search.recipe_book import RecipeBook
from rhino_jax.search.recipes import Recipe, recipes_for
from rhino_jax.search.records import Drawn, Request
from rhino_jax.search.restriction import Restriction
from rhino_jax.search.solve import Solution, solve, solve_overlapped
from rhino_jax.search.study import Study
from rhino_jax.search.untie import untie


def draw(
    study: Study,
    mesh_axes: Sequence[tuple[str, int]],
    request: Request,
) -> Drawn:
    """Enumerate and price the options on one mesh; recipes are left for later."""
    pinned = {
        n.id: spec
        for n in study.graph.nodes
        for kind, pins in (
            (NodeKind.INPUT, request.pins),
            (NodeKind.OUTPUT, request.output_pins),
        )
        if n.kind is kind and (spec := pins.get(n.slot)) is not None
    }
    laid = lay_out(study.target, mesh_axes)
    mesh = replace(laid, says_stops=not request.says_only_matmuls)
    return _draw_on(study, mesh, pinned, request)


def _draw_on(
    study: Study,
    mesh: LaidMesh,
    pinned: dict[int, Spec],
    request: Request,
) -> Drawn:
    def narrow(builder: OptionBuilder, options: list[Options]) -> list[Options]:
        if len(mesh.axes) <= 2 or count_cells(study.graph, options) <= MOST_CELLS:
            return options
        return near(builder, options, _seeds(study, mesh, request))

    budget = request.memory_budget_bytes
    model = build_model(study, mesh, pinned, budget, narrow)
    overlap, book = overlap_of(model), RecipeBook.of(model)
    folding = find_folding(overlap, marks_of(book))
    folded = folding.overlap(overlap)
    return Drawn(model, overlap, book, folding, folded)


def _seeds(study: Study, mesh: LaidMesh, request: Request) -> list[Seed]:
    """Plans of meshes in which axes are taken together: of each the best, and all
    recipes of the first. Pins are not kept there, since they may name one of them."""
    seeds: list[Seed] = []
    effort = replace(EFFORTS["fast"], seed=request.seed)
    for groups in groupings(len(mesh.axes)):
        joined = taken_together(mesh, groups)
        drawn = _draw_on(study, joined, {}, request)
        if not seeds:
            drawn = with_recipes(drawn, RECIPE_EFFORTS["fast"])
            known = [x for x in drawn.recipes.values() if x is not None]
            seeds += [Seed(drawn.model, labels, groups) for labels in known]
        else:
            known = first_choices(drawn)
        labels = solve_drawn(drawn, known, effort).labels
        if labels is not None:
            seeds.append(Seed(drawn.model, labels, groups))
    return seeds


def solve_drawn(
    drawn: Drawn,
    starts: Sequence[Labels],
    effort: Effort,
    report: Report = lambda best, bound: None,
) -> Solution:
    """Search the folded problem, and the whole one where only that fits the limit.

    Args:
      drawn: what to search.
      starts: known choices of all nodes.
      effort: limits.
      report: called with new best objectives and bounds.
    Returns:
      A choice of all nodes; None where nothing fits.
    """
    folding, whole = drawn.folding, drawn.overlap
    contracted = [folding.contract(s) for s in starts]
    found = solve_overlapped(drawn.folded, contracted, effort, report)
    if folding.is_identity:
        return found
    untied = untie(whole, folding, found, effort)
    if untied.labels is None and least_possible(whole.problem) <= whole.problem.limit:
        smallest = smallest_peak(whole.problem)
        if whole.problem.peak(smallest) <= whole.problem.limit:
            return solve_overlapped(whole, [smallest, *starts], effort, report)
    return replace(untied, nodes=(len(folding.classes), found.nodes[1]))


def with_recipes(drawn: Drawn, effort: Effort, worth: float = math.inf) -> Drawn:
    """The same with the cheapest plan within each recipe.

    One that allows more starts from those that allow less.

    Args:
      drawn: what to search.
      effort: limits of each recipe's search.
      worth: one that costs more than this many times the cheapest so far is not
        searched to the end.
    """
    found: dict[str, Labels | None] = {}
    least_s = math.inf
    for recipe, left in _allowed(drawn):
        if left is None:
            found[recipe.name] = None
            continue
        small = drawn.folded.problem.restricted(left, keeps_memory=False)
        known = [left.contract(x) for x in found.values() if x is not None]
        cheapest = sorted((x for x in known if x is not None), key=small.objective)[:1]
        starts = [_to_the_letter(drawn, left), *cheapest]
        limits = replace(effort, worth_s=worth * least_s)
        local = solve(small, starts, limits).labels
        assert local is not None
        least_s = min(least_s, small.objective(local))
        found[recipe.name] = left.expand(local)
    expanded = {
        name: None if labels is None else drawn.folding.expand(labels)
        for name, labels in found.items()
    }
    return replace(drawn, recipes=expanded)


def first_choices(drawn: Drawn) -> list[Labels]:
    """A choice of all nodes within every recipe, found without a search."""
    return [
        drawn.folding.expand(left.expand(_to_the_letter(drawn, left)))
        for _, left in _allowed(drawn)
        if left is not None
    ]


def _allowed(drawn: Drawn) -> list[tuple[Recipe, Restriction | None]]:
    """What every recipe allows the classes to choose."""
    book, costs = drawn.book, drawn.folded.problem.costs
    kinds = book.kinds([drawn.model.graph.nodes[n] for n in drawn.folding.first])
    return [
        (recipe, None if allowed is None else Restriction.of(costs, allowed))
        for recipe in recipes_for(drawn.model.mesh)
        for allowed in [book.restrict(recipe, kinds)]
    ]


def _to_the_letter(drawn: Drawn, left: Restriction) -> Labels:
    """What a recipe's name says: every class is cut by as many mesh axes as it may."""
    nodes = [drawn.model.graph.nodes[n] for n in drawn.folding.first]
    return drawn.book.most_cut(nodes, left.allowed)
