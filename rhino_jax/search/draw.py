"""A program on one mesh: its priced model, folded, and the recipes' choices in it."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace

from rhino_jax.hardware.layout import lay_out
from rhino_jax.hardware.mesh import LaidMesh
from rhino_jax.search.build import build_model
from rhino_jax.search.extract import overlap_of
from rhino_jax.search.folding import find_folding, marks_of
from rhino_jax.search.graph import Graph, Node, NodeKind
from rhino_jax.search.least_peak import least_possible, smallest_peak
from rhino_jax.search.near import (
    MOST_CELLS,
    Seed,
    count_cells,
    groupings,
    near,
    taken_together,
)
from rhino_jax.search.options import NodePin, OptionBuilder, Options
from rhino_jax.search.pool import EFFORTS, RECIPE_EFFORTS, Effort, Report
from rhino_jax.search.problem import Labels
from rhino_jax.search.recipe_book import RecipeBook
from rhino_jax.search.recipes import Recipe, recipes_for
from rhino_jax.search.records import Drawn, Request
from rhino_jax.search.restriction import Restrictions
from rhino_jax.search.solve import Solution, solve_overlapped
from rhino_jax.search.study import Study
from rhino_jax.search.untie import untie
from rhino_jax.search.within import cheapest_within


def draw(
    study: Study,
    mesh_axes: Sequence[tuple[str, int]],
    request: Request,
) -> Drawn:
    """Enumerate and price the options on one mesh; recipes are left for later."""
    pinned = pinned_nodes(study.graph, request)
    laid = lay_out(study.target, mesh_axes)
    mesh = replace(laid, says_stops=request.density == "all")
    return replace(_draw_on(study, mesh, pinned, request), density=request.density)


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
    study: Study,
    mesh: LaidMesh,
    pinned: dict[int, NodePin],
    request: Request,
) -> Drawn:
    def narrow(builder: OptionBuilder, options: list[Options]) -> list[Options]:
        if len(mesh.long) <= 2 or count_cells(study.graph, options) <= MOST_CELLS:
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
    effort = replace(EFFORTS["fast"], seed=request.seed, deadline=request.deadline)
    for places in groupings(len(mesh.long)):
        groups = tuple(tuple(mesh.long[k] for k in group) for group in places)
        if seeds and time.monotonic() > request.deadline:
            break
        joined = taken_together(mesh, groups)
        drawn = _draw_on(study, joined, {}, request)
        if not seeds:
            of_recipes = replace(RECIPE_EFFORTS["fast"], deadline=request.deadline)
            drawn = with_recipes(drawn, of_recipes)
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


def with_recipes(
    drawn: Drawn,
    effort: Effort,
    worth: float = math.inf,
    every: Sequence[Recipe] | None = None,
) -> Drawn:
    """The same with the cheapest plan within each recipe.

    Args:
      drawn: what to search.
      effort, worth: as of `cheapest_within`.
      every: the recipes; by default all that the mesh allows.
    """
    if every is None:
        every = recipes_for(drawn.model.mesh)
    recipes, left = _allowed(drawn, every)
    found: dict[str, Labels | None] = {r.name: None for r in every}
    if left is not None:
        cheapest = cheapest_within(
            drawn.folded.problem, left, _to_the_letter(drawn, left), effort, worth
        )
        for recipe, labels in zip(recipes, cheapest, strict=True):
            found[recipe.name] = drawn.folding.expand(labels)
    is_cut = time.monotonic() > effort.deadline
    return replace(drawn, recipes=found, is_cut=is_cut)


def first_choices(drawn: Drawn) -> list[Labels]:
    """A choice of all nodes within every recipe, found without a search."""
    _, left = _allowed(drawn, recipes_for(drawn.model.mesh))
    if left is None:
        return []
    return [
        drawn.folding.expand(left.expand(row, labels))
        for row, labels in enumerate(_to_the_letter(drawn, left))
    ]


def _allowed(
    drawn: Drawn, every: Sequence[Recipe]
) -> tuple[list[Recipe], Restrictions | None]:
    """The recipes that have a meaning, and what they leave the classes to choose."""
    recipes = [r for r in every if drawn.book.allows(r)]
    return recipes, drawn.book.restrict(recipes, _nodes(drawn)) if recipes else None


def _to_the_letter(drawn: Drawn, left: Restrictions) -> Labels:
    """What recipes' names say: every class is cut by as many mesh axes as it may."""
    return drawn.book.most_cut(_nodes(drawn), left)


def _nodes(drawn: Drawn) -> list[Node]:
    """The first of every class."""
    return [drawn.model.graph.nodes[n] for n in drawn.folding.first]
