"""The one visible driver: program and target in, plan out."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rhino_jax.hardware.layout import lay_out
from rhino_jax.hardware.target import Target
from rhino_jax.ir.program import Program
from rhino_jax.plan.plan import Plan
from rhino_jax.search.assemble import assemble
from rhino_jax.search.build import Model, build_model
from rhino_jax.search.candidates import Candidate, candidates_of
from rhino_jax.search.extract import overlap_of
from rhino_jax.search.flatten import flatten
from rhino_jax.search.graph import Graph, NodeKind
from rhino_jax.search.overlap import solve_overlapped
from rhino_jax.search.pool import Effort
from rhino_jax.search.problem import Labels
from rhino_jax.search.recipes import RecipeBook, recipes_for
from rhino_jax.search.records import Drawn, Found, Progress, Request
from rhino_jax.search.solve import Solution, solve


EFFORTS = {
    "fast": Effort(max_rounds=20, deterministic_s=0.0, max_fusions=1, max_prices=10),
    "best": Effort(max_rounds=60, deterministic_s=2.0, max_fusions=3, max_prices=16),
}
RECIPE_EFFORT = Effort(max_rounds=8, deterministic_s=0.0, max_fusions=1, max_prices=0)

MOST_KEPT = 3
"""Meshes whose models are kept, as candidates for the compiler."""

MANY_CELLS = 1_500_000
"""Pairs of options on a mesh of two axes beyond which meshes of more axes are not
tried unasked: a third axis makes about ten times as many (a U-Net of 14,583 nodes has
ten million, and took four minutes on 2x2x2)."""


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


def choose_plan(
    program: Program,
    meshes: Sequence[Sequence[tuple[str, int]]],
    target: Target,
    request: Request,
    *,
    progress: Progress | None = None,
) -> Plan:
    """Plan a program on the best of several meshes.

    Every mesh is searched fast, the best of them then as asked for.
    """
    started = time.monotonic()
    found, compared, notes = _search(
        program, meshes, target, request, started, progress
    )
    plan = assemble(target, request, found[0], started, compared)
    return replace(plan, notes=(*plan.notes, *notes))


def make_candidates(
    program: Program,
    meshes: Sequence[Sequence[tuple[str, int]]],
    target: Target,
    request: Request,
    count: int,
    *,
    progress: Progress | None = None,
) -> tuple[Candidate, ...]:
    """The plan of `choose_plan` and others that promise as much, to be compiled.

    Args:
      count: most plans to give; fewer where fewer differ.
    """
    started = time.monotonic()
    found, compared, notes = _search(
        program, meshes, target, request, started, progress
    )
    variants = [("best", found[0])]
    if count > 1 and found[0].solution.labels is not None:
        graph, mesh = found[0].drawn.model.graph, found[0].drawn.model.mesh
        axes = [(a.name, a.size) for a in mesh.axes]
        said = _draw(graph, axes, target, replace(request, says_only_matmuls=True))
        variants = candidates_of(found, said, EFFORTS["fast"], count)
    return tuple(
        Candidate(
            name,
            replace(plan, notes=(*plan.notes, *notes)),
        )
        for name, one in variants
        for plan in [assemble(target, request, one, started, compared)]
    )


def make_recipe_plans(
    program: Program,
    mesh_axes: Sequence[tuple[str, int]],
    target: Target,
    request: Request,
) -> dict[str, Plan | None]:
    """The experts' recipes at their best, as plans of their own.

    Whether they fit or not; None where the program does not allow a recipe. At their
    best as `request` has them said: everywhere, or around matmuls only.
    """
    started = time.monotonic()
    drawn = _draw(flatten(program), mesh_axes, target, request)
    return {
        name: None
        if labels is None
        else assemble(
            target,
            request,
            Found(drawn, _as_solution(drawn.model, labels)),
            started,
            (),
        )
        for name, labels in drawn.recipes.items()
    }


def _search(
    program: Program,
    meshes: Sequence[Sequence[tuple[str, int]]],
    target: Target,
    request: Request,
    started: float,
    progress: Progress | None,
) -> tuple[list[Found], tuple[tuple[tuple[int, ...], float], ...], list[str]]:
    """Search all meshes.

    Returns:
      What was found, the best first; where there are several meshes, their shapes and
      objectives; notes.
    """
    graph = flatten(program)
    effort = EFFORTS[request.level]
    different = _different(meshes, target)
    if len(meshes) == 1:
        drawn = _draw(graph, different[0], target, request)
        return [_solve(drawn, effort, request, started, progress)], (), []
    every: list[Found] = []
    compared: list[tuple[tuple[int, ...], float]] = []
    cells, left_out, best = 0, 0, math.inf
    for axes in different:
        if len(axes) > 2 and cells > MANY_CELLS:
            left_out += 1
            continue
        drawn = _draw(graph, axes, target, request)
        cells = sum(e.table.size for e in drawn.model.problem.edges)
        found = _solve(drawn, EFFORTS["fast"], request, started, None)
        compared.append((tuple(n for _, n in axes), found.solution.objective))
        every = sorted([*every, found], key=lambda f: f.solution.objective)[:MOST_KEPT]
        best = every[0].solution.objective
        if progress is not None and math.isfinite(best):
            progress(best, None)
    if request.level != "fast":
        known = every[0].solution.labels
        starts = () if known is None else (known,)
        every[0] = _solve(every[0].drawn, effort, request, started, progress, starts)
    notes = []
    if left_out:
        notes.append(
            f"{left_out} mesh shapes of three or more axes were not tried, because the"
            " program is large: give mesh= to plan on one of them."
        )
    return every, tuple(sorted(compared, key=lambda c: c[1])), notes


def _different(
    meshes: Sequence[Sequence[tuple[str, int]]], target: Target
) -> list[Sequence[tuple[str, int]]]:
    """Meshes that differ only in the names of their axes have the same plans."""
    found: dict[tuple[object, ...], Sequence[tuple[str, int]]] = {}
    for axes in meshes:
        laid = lay_out(target, axes).axes
        links = sorted((a.size, a.alpha_s, a.bytes_per_s, a.topology) for a in laid)
        found.setdefault(tuple(links), axes)
    return list(found.values())


def _draw(
    graph: Graph,
    mesh_axes: Sequence[tuple[str, int]],
    target: Target,
    request: Request,
) -> Drawn:
    """Enumerate and price the options on one mesh, and solve the recipes."""
    pinned = {
        n.id: spec
        for n in graph.nodes
        for kind, pins in (
            (NodeKind.INPUT, request.pins),
            (NodeKind.OUTPUT, request.output_pins),
        )
        if n.kind is kind and (spec := pins.get(n.slot)) is not None
    }
    mesh = replace(lay_out(target, mesh_axes), says_stops=not request.says_only_matmuls)
    model = build_model(graph, mesh, target, pinned, request.memory_budget_bytes)
    return Drawn(model, _solve_recipes(model))


def _solve(
    drawn: Drawn,
    effort: Effort,
    request: Request,
    started: float,
    progress: Progress | None,
    starts: Sequence[Labels] = (),
) -> Found:
    """Search, from the recipes and other known choices."""
    deadline = started + (request.time_limit_s or math.inf)
    model = drawn.model
    known = [*starts, *(x for x in drawn.recipes.values() if x is not None)]
    fitting = [s for s in known if model.problem.peak(s) <= model.problem.limit]
    if time.monotonic() > deadline and fitting:
        return Found(drawn, _best_start(model, fitting), is_fallback=True)
    effort = replace(effort, deadline=deadline, seed=request.seed)
    report = progress or (lambda best, bound: None)
    return Found(drawn, solve_overlapped(overlap_of(model), known, effort, report))


def _best_start(model: Model, starts: list[Labels]) -> Solution:
    return _as_solution(model, min(starts, key=overlap_of(model).step_s))


def _as_solution(model: Model, labels: Labels) -> Solution:
    """A known choice, of which nothing is proved."""
    peak, count = model.problem.peak(labels), len(model.graph.nodes)
    objective = overlap_of(model).step_s(labels)
    return Solution(labels, objective, 0.0, peak, peak, 0, (count, count))


def _solve_recipes(model: Model) -> dict[str, Labels | None]:
    """The cheapest plan within each recipe; one that allows more starts from those
    that allow less."""
    book = RecipeBook.of(model)
    found: dict[str, Labels | None] = {}
    for recipe in recipes_for(model.mesh):
        allowed = book.restrict(recipe)
        if allowed is None:
            found[recipe.name] = None
            continue
        small = model.problem.restricted(allowed)
        small.limit = math.inf
        starts = [_within(allowed, x) for x in found.values() if x is not None]
        known = [x for x in starts if x is not None]
        local = solve(small, known, RECIPE_EFFORT).labels
        assert local is not None
        found[recipe.name] = np.array(
            [a[k] for a, k in zip(allowed, local, strict=True)], dtype=np.int64
        )
    return found


def _within(allowed: Sequence[np.ndarray], labels: Labels) -> Labels | None:
    """A choice in terms of the allowed options, or None where it uses others."""
    local = np.zeros(len(labels), dtype=np.int64)
    for i, options in enumerate(allowed):
        at = int(np.searchsorted(options, labels[i]))
        if at == len(options) or options[at] != labels[i]:
            return None
        local[i] = at
    return local
