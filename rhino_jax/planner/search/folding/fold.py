"""The folded problem of a cost model: one node for each orbit of repeated nodes."""

from __future__ import annotations

from rhino_jax.model.build import MeshModel
from rhino_jax.planner.search.folding.symmetry import Symmetry, find_symmetry, marks_of
from rhino_jax.planner.search.limits import LIMITS
from rhino_jax.planner.search.read_back.extract import overlap_of
from rhino_jax.planner.search.records import MeshProblem
from rhino_jax.recipes.recipe_book import RecipeBook


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
