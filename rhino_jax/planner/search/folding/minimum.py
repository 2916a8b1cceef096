"""The choice of a mesh problem with the smallest memory peak, whatever the budget."""

from __future__ import annotations

from rhino_jax.planner.search.limits import LIMITS
from rhino_jax.planner.search.records import MeshProblem
from rhino_jax.solver.least_peak import least_possible, minimum_peak
from rhino_jax.solver.problem import Labels


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
