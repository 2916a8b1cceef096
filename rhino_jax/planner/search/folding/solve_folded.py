"""The folded problem of one mesh, solved, and its solution unfolded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rhino_jax.planner.search.folding.symmetry import Symmetry
from rhino_jax.planner.search.folding.unfold import unfold
from rhino_jax.planner.search.records import MeshProblem
from rhino_jax.solver.incumbents import Effort, Report
from rhino_jax.solver.least_peak import least_possible, smallest_peak
from rhino_jax.solver.overlap import Overlap
from rhino_jax.solver.problem import Labels
from rhino_jax.solver.solve import Solution, solve_overlapped


def solve_mesh_problem(
    mesh_problem: MeshProblem,
    starts: Sequence[Labels],
    effort: Effort,
    report: Report = lambda best, bound: None,
    before: Solution | None = None,
) -> Solution:
    """Search the folded problem, and the unfolded one where only that fits the limit.

    Args:
      mesh_problem: the problem.
      starts: known choices of all nodes; the result is no worse than the best of them
        that fits.
      effort: limits of the search.
      report: called with new best objectives and bounds, in seconds.
      before: the result of a search of the same problem: see `solve_overlapped`.
    Returns:
      A choice of all nodes; its labels are None where nothing fits.
    """
    symmetry, whole = mesh_problem.symmetry, mesh_problem.overlap
    contracted = [symmetry.contract(s) for s in starts]
    found = solve_overlapped(mesh_problem.folded, contracted, effort, report, before)
    if symmetry.is_identity:
        return found
    unfolded = unfold(whole, symmetry, found, effort)
    if unfolded.labels is None and least_possible(whole.problem) <= whole.problem.limit:
        smallest = smallest_peak(whole.problem)
        if whole.problem.peak(smallest) <= whole.problem.limit:
            return solve_overlapped(whole, [smallest, *starts], effort, report)
    nodes = len(symmetry.orbits), found.nodes[1]
    return replace(_or_better(whole, symmetry, unfolded, starts), nodes=nodes)


def _or_better(
    whole: Overlap, symmetry: Symmetry, found: Solution, starts: Sequence[Labels]
) -> Solution:
    """Return the solution, or a better start in which repeated nodes choose
    differently: the folded problem cannot express it."""
    for start in starts:
        if np.array_equal(symmetry.expand(symmetry.contract(start)), start):
            continue
        objective, peak = whole.step_s(start), whole.problem.peak(start)
        if objective < found.objective and peak <= whole.problem.limit:
            bound = min(found.bound, objective)
            lowest = min(found.lowest_peak, peak)
            found = replace(
                found,
                labels=start,
                objective=objective,
                bound=bound,
                peak=peak,
                lowest_peak=lowest,
                unfit=None,
            )
    return found
