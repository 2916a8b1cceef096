"""The one visible driver: program and target in, plan out."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rhino_jax.hardware.layout import lay_out
from rhino_jax.hardware.target import Target
from rhino_jax.ir.program import Program, item_bytes
from rhino_jax.ir.spec import Spec, format_spec, local_shape
from rhino_jax.plan.fingerprint import fingerprint
from rhino_jax.plan.plan import Leaf, Plan
from rhino_jax.plan.records import Coverage, Predicted, SearchReport
from rhino_jax.search.build import Model, build_model
from rhino_jax.search.extract import (
    at_peak,
    collectives_of,
    coverage_shares,
    decisions_of,
    overlap_of,
    predicted_of,
)
from rhino_jax.search.flatten import flatten
from rhino_jax.search.graph import Graph, NodeKind
from rhino_jax.search.infeasible import explain
from rhino_jax.search.overlap import solve_overlapped
from rhino_jax.search.pool import OPTIMAL_GAP, Effort
from rhino_jax.search.problem import Labels
from rhino_jax.search.recipes import RecipeBook, recipes_for
from rhino_jax.search.solve import Solution, solve


Progress = Callable[[float | None, float | None], None]

EFFORTS = {
    "fast": Effort(max_rounds=20, deterministic_s=0.0, max_fusions=1, max_prices=10),
    "best": Effort(max_rounds=60, deterministic_s=2.0, max_fusions=3, max_prices=16),
}
RECIPE_EFFORT = Effort(max_rounds=8, deterministic_s=0.0, max_fusions=1, max_prices=0)


MANY_CELLS = 1_500_000
"""Pairs of options on a mesh of two axes beyond which meshes of more axes are not
tried unasked: a third axis makes about ten times as many (a U-Net of 14,583 nodes has
ten million, and took four minutes on 2x2x2)."""


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked for, besides program, mesh and target.

    Attributes:
      memory_budget_bytes: per device.
      pins: input slot → spec.
      output_pins: output slot → spec.
      level: "fast" or "best".
      time_limit_s: wall-clock limit of the search, or None.
      seed: of CP-SAT.
    """

    memory_budget_bytes: float
    pins: Mapping[int, Spec]
    output_pins: Mapping[int, Spec]
    level: str = "best"
    time_limit_s: float | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class _Drawn:
    """A priced model on one mesh, and the recipes' choices in it."""

    model: Model
    recipes: dict[str, Labels | None]


@dataclass(frozen=True, slots=True, eq=False)
class _Found:
    """A searched model; `is_fallback` where the time was over before the search."""

    drawn: _Drawn
    solution: Solution
    is_fallback: bool = False


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
    started = time.monotonic()
    drawn = _draw(flatten(program), mesh_axes, target, request)
    found = _solve(drawn, EFFORTS[request.level], request, started, progress)
    return _assemble(target, request, found, started, ())


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
    graph = flatten(program)
    best: _Found | None = None
    compared: list[tuple[tuple[int, ...], float]] = []
    cells, left_out = 0, 0
    for axes in _different(meshes, target):
        if len(axes) > 2 and cells > MANY_CELLS:
            left_out += 1
            continue
        drawn = _draw(graph, axes, target, request)
        cells = sum(e.table.size for e in drawn.model.problem.edges)
        found = _solve(drawn, EFFORTS["fast"], request, started, None)
        compared.append((tuple(n for _, n in axes), found.solution.objective))
        if best is None or found.solution.objective < best.solution.objective:
            best = found
        if progress is not None and best.solution.labels is not None:
            progress(best.solution.objective, None)
    assert best is not None, "there is always a mesh to try"
    if request.level != "fast":
        starts = () if best.solution.labels is None else (best.solution.labels,)
        effort = EFFORTS[request.level]
        best = _solve(best.drawn, effort, request, started, progress, starts)
    ranked = tuple(sorted(compared, key=lambda c: c[1]))
    plan = _assemble(target, request, best, started, ranked)
    if left_out:
        note = (
            f"{left_out} mesh shapes of three or more axes were not tried, because the"
            " program is large: give mesh= to plan on one of them."
        )
        plan = replace(plan, notes=(*plan.notes, note))
    return plan


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
) -> _Drawn:
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
    mesh = lay_out(target, mesh_axes)
    model = build_model(graph, mesh, target, pinned, request.memory_budget_bytes)
    return _Drawn(model, _solve_recipes(model))


def _solve(
    drawn: _Drawn,
    effort: Effort,
    request: Request,
    started: float,
    progress: Progress | None,
    starts: Sequence[Labels] = (),
) -> _Found:
    """Search, from the recipes and other known choices."""
    deadline = started + (request.time_limit_s or math.inf)
    model = drawn.model
    known = [*starts, *(x for x in drawn.recipes.values() if x is not None)]
    fitting = [s for s in known if model.problem.peak(s) <= model.problem.limit]
    if time.monotonic() > deadline and fitting:
        return _Found(drawn, _best_start(model, fitting), is_fallback=True)
    effort = replace(effort, deadline=deadline, seed=request.seed)
    report = progress or (lambda best, bound: None)
    return _Found(drawn, solve_overlapped(overlap_of(model), known, effort, report))


def _best_start(model: Model, starts: list[Labels]) -> Solution:
    overlap = overlap_of(model)
    best = min(starts, key=overlap.step_s)
    return Solution(
        best,
        overlap.step_s(best),
        0.0,
        model.problem.peak(best),
        model.problem.peak(best),
        0,
        (len(model.graph.nodes), len(model.graph.nodes)),
    )


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


def _assemble(
    target: Target,
    request: Request,
    found: _Found,
    started: float,
    meshes: tuple[tuple[tuple[int, ...], float], ...],
) -> Plan:
    model, solution = found.drawn.model, found.solution
    program = model.graph.program
    if solution.labels is None:
        raise explain(model, solution, request.pins, program, target)
    mesh_axes = tuple((a.name, a.size) for a in model.mesh.axes)
    labels = solution.labels
    collectives = collectives_of(model, labels)
    decisions = decisions_of(model, labels)
    names = model.mesh.names
    notes: list[str] = []
    if found.is_fallback:
        notes.append(
            "the time limit was over before the search began: this is the best recipe."
        )
    recipes: dict[str, Predicted | None] = {}
    for name, choice in found.drawn.recipes.items():
        recipes[name] = (
            None
            if choice is None
            else predicted_of(model, choice, collectives_of(model, choice))
        )
    ops, flops, size, unknown = coverage_shares(program)
    if unknown:
        listed = ", ".join(f"{n} ({c})" for n, c in unknown.items())
        notes.append(f"replicated for want of a rule: {listed}.")
    status = "optimal" if solution.gap <= OPTIMAL_GAP else "feasible"
    return Plan(
        program_name=program.name,
        fingerprint=fingerprint(program, mesh_axes),
        mesh_axes=mesh_axes,
        hardware=target.name,
        inputs=tuple(
            _leaf(program, e.value, e.path, decisions.values.get(e.value), model)
            for e in program.inputs
        ),
        outputs=tuple(
            _leaf(program, e.value, e.path, spec, model)
            for e, spec in zip(program.outputs, decisions.outputs, strict=True)
        ),
        decisions=decisions,
        predicted=predicted_of(model, labels, collectives),
        collectives=collectives,
        search=SearchReport(
            status="recipe" if found.is_fallback else status,
            objective_s=solution.objective,
            bound_s=solution.bound,
            gap=solution.gap,
            seconds=time.monotonic() - started,
            variables=solution.variables,
            level=request.level,
            nodes=solution.nodes,
        ),
        coverage=Coverage(
            ops, flops, size, tuple(sorted(unknown.items(), key=lambda u: -u[1]))
        ),
        recipes=recipes,
        memory_budget_bytes=int(request.memory_budget_bytes),
        at_peak=at_peak(model, labels),
        pins={
            program.inputs[slot].path: format_spec(spec, names)
            for slot, spec in request.pins.items()
        },
        meshes=meshes,
        notes=tuple(notes),
    )


def _leaf(
    program: Program, value_id: int, path: str, spec: Spec | None, model: Model
) -> Leaf:
    value = program.values[value_id]
    spec = spec if spec is not None else ((),) * value.rank
    local = local_shape(spec, value.shape, model.mesh.sizes)
    return Leaf(
        path,
        value.shape,
        value.dtype,
        spec,
        math.prod(local) * item_bytes(value.dtype),
    )
