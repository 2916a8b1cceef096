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
from rhino_jax.ir.transform import EXPERTS
from rhino_jax.plan.records import Predicted
from rhino_jax.planner.search.driver import solve_recipes
from rhino_jax.planner.search.read_back.assemble import recipes_of
from rhino_jax.planner.search.records import MeshProblem
from rhino_jax.planner.variant_search import Search, VariantCandidate
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


def all_recipes(of: VariantCandidate) -> dict[str, Predicted | None]:
    """Return the predictions for the recipes of a searched program, as `recipes_of`."""
    found = of.found.recipes()
    for _, problem in in_parts(of.search.quiet(of.found.mesh_axes)) if found else ():
        found |= recipes_of(problem)
    return found
