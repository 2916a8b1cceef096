"""The one visible driver: program and target in, plan out."""

from __future__ import annotations

import contextlib
import gc
import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from rhino_jax.analysis.program_analysis import ProgramAnalysis
from rhino_jax.hardware.layout import lay_out
from rhino_jax.hardware.target import Target
from rhino_jax.ir.program import Program
from rhino_jax.optimize.incumbents import EFFORTS, RECIPE_EFFORTS, Effort
from rhino_jax.plan.plan import Plan
from rhino_jax.plan.records import CUT_BY_CLOCK
from rhino_jax.recipes.recipes import plain_recipes
from rhino_jax.search.candidates import Candidate, candidates_of, plain_of
from rhino_jax.search.limits import LIMITS
from rhino_jax.search.mesh_problem import build_mesh_problem
from rhino_jax.search.passes import ANALYSE, INLINE, READ_BACK, RECIPES, SOLVE
from rhino_jax.search.read_back.assemble import assemble
from rhino_jax.search.recipe_choices import first_choices, with_recipes
from rhino_jax.search.records import Progress, Request, SolvedMesh
from rhino_jax.search.solve_on_mesh import as_solution, is_over


COMPARED = replace(EFFORTS["fast"], max_starts=2, max_fusions=0)
"""How meshes are compared; the best of them is searched again."""


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Planning builds many objects and no cycles of them. Python would look for such
    cycles in all of them again and again: a fifth of the time of GPT-3 175B."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def make_plan(
    program: Program,
    mesh_axes: Sequence[tuple[str, int]],
    target: Target,
    request: Request,
    *,
    progress: Progress | None = None,
) -> Plan:
    """Plan a program on one mesh.

    Args:
      program: what to plan.
      mesh_axes: (name, size), major first.
      target: the hardware.
      request: budget, pins, level and limits.
      progress: called with new best objectives and bounds, in seconds.
    Raises:
      InfeasiblePlanError: nothing fits; says what conflicts and what would help.
    """
    return choose_plan(program, [mesh_axes], target, request, progress=progress)


@_no_garbage_collection()
def choose_plan(
    program: Program,
    meshes: Sequence[Sequence[tuple[str, int]]],
    target: Target,
    request: Request,
    *,
    progress: Progress | None = None,
) -> Plan:
    """Plan a program on the best of several meshes.

    Each is searched fast, the best of them then as asked for. Those of three and more
    axes are left out where the axis before gained little or the search would take long
    (`Limits.axis_gain`, `Limits.meshes_s`), which the notes say.
    """
    started = time.monotonic()
    request = _with_deadline(request, started)
    found, compared, notes = _search(program, meshes, target, request, progress)
    plan = READ_BACK.run(request.watch, target, request, found[0], started, compared)
    return replace(plan, notes=(*plan.notes, *notes))


@_no_garbage_collection()
def make_candidates(
    program: Program,
    meshes: Sequence[Sequence[tuple[str, int]]],
    target: Target,
    request: Request,
    count: int,
    *,
    progress: Progress | None = None,
) -> tuple[Candidate, ...]:
    """The plan of `choose_plan`, and others of nearly its predicted step to compile.

    Args:
      count: most plans to give, fewer where fewer differ; besides plain recipes, as
        most people type them.
    """
    started = time.monotonic()
    request = _with_deadline(request, started)
    found, compared, notes = _search(program, meshes, target, request, progress)
    variants = [("best", found[0])]
    if found[0].solution.labels is not None and not is_over(request):
        model, effort = found[0].mesh_problem.model, _recipe_effort(request)
        axes = [(a.name, a.size) for a in model.mesh.axes]
        annotated = build_mesh_problem(
            model.analysis, axes, replace(request, density="matmul")
        )
        plain = replace(annotated, density="batch")
        plain = with_recipes(plain, effort, every=plain_recipes(model.mesh))
        recipes, left_out = plain_of(found[0], plain)
        notes = [*notes, *left_out]
        if count > 1:
            annotated = with_recipes(annotated, effort)
            fast = replace(EFFORTS["fast"], deadline=request.deadline)
            variants = candidates_of(found, annotated, fast, count)
        variants = [*variants, *recipes]
    return tuple(
        Candidate(
            name,
            replace(plan, notes=(*plan.notes, *notes)),
        )
        for name, one in variants
        for plan in [assemble(target, request, one, started, compared)]
    )


@_no_garbage_collection()
def make_recipe_plans(
    program: Program,
    mesh_axes: Sequence[tuple[str, int]],
    target: Target,
    request: Request,
) -> dict[str, Plan | None]:
    """The experts' recipes at their best, as plans of their own.

    Whether they fit or not; None where the program does not allow a recipe. Each is
    the cheapest plan within the recipe under the request's density (all values, or
    those around matmuls); with density "batch" it is as most people type it.
    """
    started = time.monotonic()
    mesh_problem = build_mesh_problem(
        ProgramAnalysis.of(program, target), mesh_axes, request
    )
    every = (
        plain_recipes(mesh_problem.model.mesh) if request.density == "batch" else None
    )
    mesh_problem = with_recipes(
        mesh_problem, RECIPE_EFFORTS[request.level], every=every
    )
    return {
        name: None
        if labels is None
        else assemble(
            target,
            request,
            SolvedMesh(mesh_problem, as_solution(mesh_problem, labels)),
            started,
            (),
        )
        for name, labels in mesh_problem.recipes.items()
    }


def _search(
    program: Program,
    meshes: Sequence[Sequence[tuple[str, int]]],
    target: Target,
    request: Request,
    progress: Progress | None,
) -> tuple[list[SolvedMesh], tuple[tuple[tuple[int, ...], float], ...], list[str]]:
    """Search all meshes that are worth it.

    Returns:
      What was found, the best first; where there are several meshes, shapes and
      objectives of those that were searched; notes.
    """
    begun, watch = time.monotonic(), request.watch
    analysis = ANALYSE.run(watch, INLINE.run(watch, program), target)
    # To make a plan of what is found takes about as long as this did.
    analysis_s = time.monotonic() - begun
    request = replace(request, deadline=request.deadline - analysis_s)
    effort = EFFORTS[request.level]
    different = distinct_meshes(meshes, target)
    if len(meshes) == 1:
        mesh_problem = build_mesh_problem(analysis, different[0], request)
        mesh_problem = RECIPES.run(
            watch, mesh_problem, _recipe_effort(request), LIMITS.recipe_worth
        )
        return [SOLVE.run(watch, mesh_problem, effort, request, progress)], (), []
    every: list[SolvedMesh] = []
    compared: list[tuple[tuple[int, ...], float]] = []
    limits = _MoreAxes.of(request)
    for axes in different:
        if every and is_over(request):
            limits.untimely += 1
            continue
        if not limits.allow(len(axes)):
            continue
        mesh_problem = build_mesh_problem(analysis, axes, request)
        starts = first_choices(mesh_problem)
        found = SOLVE.run(watch, mesh_problem, COMPARED, request, None, starts)
        limits.met(len(axes), found)
        compared.append((tuple(n for _, n in axes), found.solution.objective))
        every = sorted([*every, found], key=lambda f: f.solution.objective)
        every = every[: LIMITS.most_meshes]
        best = every[0].solution.objective
        if progress is not None and math.isfinite(best):
            progress(best, None)
    mesh_problem = RECIPES.run(
        watch, every[0].mesh_problem, _recipe_effort(request), LIMITS.recipe_worth
    )
    known = every[0].solution.labels
    starts = [] if known is None else [known]
    every[0] = SOLVE.run(watch, mesh_problem, effort, request, progress, starts)
    return every, tuple(sorted(compared, key=lambda c: c[1])), limits.notes()


@dataclass(slots=True)
class _MoreAxes:
    """Whether meshes of three and more axes are worth trying.

    Attributes:
      left_s: what is left of the time that they may take.
      cells: number of axes → pairs of options of the largest folded problem.
      best: number of axes → the best objective of such a mesh.
      left_out: why → how many meshes.
      untimely: how many meshes, of any number of axes, there was no time for.
    """

    left_s: float
    cells: Counter[int] = field(default_factory=Counter)
    best: dict[int, float] = field(default_factory=dict)
    left_out: Counter[str] = field(default_factory=Counter)
    untimely: int = 0

    @classmethod
    def of(cls, request: Request) -> _MoreAxes:
        limit_s = request.time_limit_s
        share = LIMITS.meshes_share
        return cls(LIMITS.meshes_s if limit_s is None else share * limit_s)

    def met(self, num_axes: int, found: SolvedMesh) -> None:
        edges = found.mesh_problem.folded.problem.edges
        cells = sum(e.table.size for e in edges)
        self.cells[num_axes] = max(self.cells[num_axes], cells)
        before = self.best.get(num_axes, math.inf)
        self.best[num_axes] = min(before, found.solution.objective)

    def allow(self, num_axes: int) -> bool:
        if num_axes <= 2:
            return True
        fewer = [s for n, s in self.best.items() if n < num_axes - 1]
        last = self.best.get(num_axes - 1, math.inf)
        if fewer and last > (1 - LIMITS.axis_gain) * min(fewer):
            why = f"the axis before gained less than {LIMITS.axis_gain:.0%}"
            self.left_out[why] += 1
            return False
        takes_s = LIMITS.another_axis_s * self.cells[num_axes - 1]
        if takes_s > self.left_s:
            self.left_out["the program is large"] += 1
            return False
        self.left_s -= takes_s
        return True

    def notes(self) -> list[str]:
        untimely = [
            f"{CUT_BY_CLOCK} was over before mesh shapes were compared:"
            f" {self.untimely}. Give mesh= to plan on one."
        ]
        return untimely * bool(self.untimely) + [
            f"mesh shapes of three or more axes that were not tried, because {why}:"
            f" {count}. Give mesh= to plan on one."
            for why, count in self.left_out.items()
        ]


def distinct_meshes(
    meshes: Sequence[Sequence[tuple[str, int]]], target: Target
) -> list[Sequence[tuple[str, int]]]:
    """Meshes that differ only in the names of their axes have the same plans."""
    found: dict[frozenset[object], Sequence[tuple[str, int]]] = {}
    for axes in meshes:
        found.setdefault(lay_out(target, axes).signature, axes)
    return list(found.values())


def _with_deadline(request: Request, started: float) -> Request:
    """The request with the time at which it is over."""
    deadline = started + (request.time_limit_s or math.inf)
    return replace(request, deadline=min(request.deadline, deadline))


def _recipe_effort(request: Request) -> Effort:
    """Of the recipes, which leave time for the search that starts from them."""
    left = LIMITS.recipes_share * (request.deadline - time.monotonic())
    deadline = time.monotonic() + max(0.0, left)
    return replace(RECIPE_EFFORTS[request.level], deadline=deadline)
