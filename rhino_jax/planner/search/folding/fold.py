"""Repeats of a priced model folded."""

from __future__ import annotations

from rhino_jax.model.build import MeshModel
from rhino_jax.planner.search.folding.symmetry import Symmetry, find_symmetry, marks_of
from rhino_jax.planner.search.limits import LIMITS
from rhino_jax.planner.search.read_back.extract import overlap_of
from rhino_jax.planner.search.records import MeshProblem
from rhino_jax.recipes.recipe_book import RecipeBook


def fold(model: MeshModel, density: str) -> MeshProblem:
    """The model with its repeats found, where a search of all takes long; recipes are
    left for later.

    Args:
      density: as of `Request`.
    """
    overlap, book = overlap_of(model), RecipeBook.of(model)
    if LIMITS.search_s(overlap.problem) <= LIMITS.unfolded_s:
        symmetry = Symmetry.none(len(model.options))
    else:
        symmetry = find_symmetry(overlap, marks_of(book))
    folded = symmetry.overlap(overlap)
    return MeshProblem(model, overlap, book, symmetry, folded, density=density)
