"""The recipes' choices in the problem of one mesh."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace

from rhino_jax.planner.search.records import MeshProblem
from rhino_jax.recipes.recipes import Recipe, recipes_for
from rhino_jax.solver.incumbents import Effort
from rhino_jax.solver.problem import Labels
from rhino_jax.solver.restricted import Restrictions, cheapest_restricted


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
    found: dict[str, Labels | None] = {r.name: None for r in every}
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
