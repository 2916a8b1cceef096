"""The recipes' choices in the problem of one mesh."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace

from rhino_jax.analysis.graph import Node
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
            _to_the_letter(mesh_problem, left),
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
        for row, labels in enumerate(_to_the_letter(mesh_problem, left))
    ]


def _allowed(
    mesh_problem: MeshProblem, every: Sequence[Recipe]
) -> tuple[list[Recipe], Restrictions | None]:
    """Return the recipes that apply to the program, and the options that they leave
    each orbit; None where no recipe applies."""
    recipes = [r for r in every if mesh_problem.book.allows(r)]
    return recipes, mesh_problem.book.restrict(
        recipes, _nodes(mesh_problem)
    ) if recipes else None


def _to_the_letter(mesh_problem: MeshProblem, left: Restrictions) -> Labels:
    """Return the recipes taken literally: every orbit is sharded over as many mesh axes
    as the recipe allows."""
    return mesh_problem.book.most_cut(_nodes(mesh_problem), left)


def _nodes(mesh_problem: MeshProblem) -> list[Node]:
    """Return the first node of every orbit."""
    return [mesh_problem.model.graph.nodes[n] for n in mesh_problem.symmetry.first]
