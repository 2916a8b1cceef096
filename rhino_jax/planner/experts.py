"""Recipes that shard experts, for programs that sort tokens by expert.

As written, such a program has all experts in one product, and no axis can shard them.
Recipes apply to it with its experts in as many parts as their axes have devices, which
is what `passes.experts` makes of it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from rhino_jax.hardware.layout import lay_out
from rhino_jax.ir.transform import EXPERTS, UN_REMAT
from rhino_jax.plan.records import Predicted
from rhino_jax.planner.search.driver import solve_recipes
from rhino_jax.planner.search.read_back.assemble import recipes_of
from rhino_jax.planner.search.records import MeshProblem
from rhino_jax.planner.variant_search import (
    MIN_LAYOUT_GAIN,
    Search,
    VariantCandidate,
    Variants,
)
from rhino_jax.recipes.recipes import Recipe, recipes_for


def in_parts(search: Search, name: str = "") -> Iterator[tuple[Search, MeshProblem]]:
    """Yield the searches of a program with its experts in parts, and the recipes that
    are fastest there.

    Args:
      search: the search of the program, on one mesh.
      name: the only recipe to solve; empty: all that shard experts.
    """
    mesh = lay_out(search.target, search.meshes[0])
    recipes: dict[int, list[Recipe]] = defaultdict(list)
    for recipe in recipes_for(mesh):
        if recipe.experts and name in ("", recipe.name):
            recipes[math.prod(mesh.sizes[a] for a in recipe.experts)].append(recipe)
    if search.request.is_over or not recipes:
        return
    best: dict[str, tuple[float, Search, MeshProblem]] = {}
    for choice in search.tries(EXPERTS):
        if every := recipes.get(choice.chosen["parts"]):
            own = search.after([choice])
            program, (axes, *_), target, request = own.problem
            problem = solve_recipes(program, axes, target, request, every)
            for key, found in recipes_of(problem).items():
                step_s = found.step_time_s if found else math.inf
                if key not in best or step_s < best[key][0]:
                    best[key] = step_s, own, problem
    for key, (_, own, problem) in best.items():
        yield own, replace(problem, recipes={key: problem.recipes[key]})


def with_experts(own: VariantCandidate, written: VariantCandidate) -> VariantCandidate:
    """Return the user's program with its experts in parts, where that is predicted to
    be faster than what other passes make of it; else `own`.

    Where other passes undo a `jax.checkpoint`, rows of experts leave the loop over
    layers, and their parts have room for all rows (`passes.experts.rounds`).

    Args:
      own: the program with passes, searched; a plan fits.
      written: the program as the user wrote it, searched.
    """
    if all(t.name != UN_REMAT for t in own.search.transforms):
        return own
    search = written.search.on(own.found.mesh_axes).asking(has_recipes=False)
    variants = Variants(search=search, min_gain=MIN_LAYOUT_GAIN)
    variants.begin(replace(own, found=own.found.at_fast, done=()))
    for choice in search.tries(EXPERTS):
        if choice.chosen["parts"] > 1:
            variants.variant("experts in parts", [choice])
    best = variants.taken()
    return min([own, best.again()], key=lambda c: c.step_s) if best.done else own


def all_recipes(of: VariantCandidate) -> dict[str, Predicted | None]:
    """Return the predictions for the recipes of a searched program, as `recipes_of`."""
    found = of.found.recipes()
    for _, problem in in_parts(of.search.quiet(of.found.mesh_axes)) if found else ():
        found |= recipes_of(problem)
    return found
