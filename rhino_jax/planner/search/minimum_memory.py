"""The plan of a program with the smallest memory peak, whatever its step time."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace

from rhino_jax.analysis.program_analysis import ProgramAnalysis
from rhino_jax.hardware.target import Target
from rhino_jax.ir.program import Program
from rhino_jax.planner.search.driver import distinct_meshes
from rhino_jax.planner.search.folding import minimum_memory
from rhino_jax.planner.search.found import SearchResult
from rhino_jax.planner.search.limits import LIMITS
from rhino_jax.planner.search.mesh_problem import build_mesh_problem
from rhino_jax.planner.search.passes import ANALYSE, INLINE
from rhino_jax.planner.search.records import Request, SolvedMesh
from rhino_jax.planner.search.solve_on_mesh import as_solution
from rhino_jax.solver.least_peak import least_possible


def find_minimum_memory(
    program: Program,
    meshes: Sequence[Sequence[tuple[str, int]]],
    target: Target,
    request: Request,
) -> SearchResult:
    """Return the choice with the smallest peak on each mesh, the smallest first.

    Args:
      program: the program to plan.
      meshes: (name, size) of the axes of each; where there are several, those of more
        than `LIMITS.minimum_axes` axes are left out.
      target: the hardware.
      request: pins; its memory budget is no limit here, and only says which values are
        too small to be counted (`CONSTANTS.small_share`).
    Returns:
      Choices of all nodes with their peaks, under no memory limit.
    """
    started = time.monotonic()
    graph = INLINE.run(None, program, fuses_rotations=target.device.fuses_rotations)
    analysis = ANALYSE.run(None, graph, target)
    # Which values are too small to be counted depends on the budget; one above the
    # device's memory must not raise that threshold.
    budget = min(request.memory_budget_bytes, target.device.hbm_bytes)
    free = replace(request, memory_budget_bytes=budget, watch=None)
    every = distinct_meshes(meshes, target)
    short = [axes for axes in every if len(axes) <= LIMITS.minimum_axes]
    found = [_on(analysis, axes, free) for axes in short or every[:1]]
    found.sort(key=lambda one: one.solution.peak)
    unlimited = replace(free, memory_budget_bytes=math.inf)
    return SearchResult(found, (), [], target, unlimited, started)


def _on(
    analysis: ProgramAnalysis, axes: Sequence[tuple[str, int]], request: Request
) -> SolvedMesh:
    mesh_problem = build_mesh_problem(analysis, axes, request).within(math.inf)
    labels = minimum_memory(mesh_problem)
    return SolvedMesh(mesh_problem, as_solution(mesh_problem, labels))


def refused(found: SearchResult, request: Request) -> SearchResult:
    """Return the result as one in which no plan fits, for its error.

    Args:
      found: a result of `find_minimum_memory`.
      request: the request, with a memory budget below the smallest peak.
    """
    limit = request.memory_budget_bytes
    solved = [
        SolvedMesh(
            one.mesh_problem.within(limit),
            replace(one.solution, labels=None, objective=math.inf),
        )
        for one in found.solved[:1]
    ]
    return replace(found, solved=solved, request=request)


def divided_peak(found: SearchResult) -> float:
    """Return the peak in bytes if every value were divided evenly over all devices: a
    lower bound on the memory of pipeline stages of the same program.

    Args:
      found: a result of `find_minimum_memory`.
    """
    mesh_problem = found.solved[0].mesh_problem
    return least_possible(mesh_problem.model.problem, mesh_problem.devices)
