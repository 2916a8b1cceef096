"""A program on one mesh: its cost model, folded, and the recipes' choices in it."""

from __future__ import annotations

import time
from dataclasses import replace

from rhino_jax.analysis.graph import NodeKind
from rhino_jax.analysis.program_analysis import ProgramAnalysis
from rhino_jax.hardware.layout import lay_out
from rhino_jax.hardware.mesh import LaidMesh
from rhino_jax.model.constants import CONSTANTS
from rhino_jax.model.neighbourhood import (
    Seed,
    centres_of,
    count_cells,
    groupings,
    least_cells,
    neighbourhood,
    taken_together,
)
from rhino_jax.model.options import NodePin, OptionBuilder, Options
from rhino_jax.planner.search.folding import (
    first_choices,
    solve_mesh_problem,
    with_recipes,
)
from rhino_jax.planner.search.passes import FOLD, PRICE
from rhino_jax.planner.search.records import MeshAxes, MeshProblem, Request
from rhino_jax.solver.incumbents import EFFORTS, RECIPE_EFFORTS


def build_mesh_problem(
    analysis: ProgramAnalysis,
    mesh_axes: MeshAxes,
    request: Request,
) -> MeshProblem:
    """Enumerate the options on one mesh, with their costs; recipes follow later."""
    pinned: dict[int, NodePin] = {
        n.id: ((0, spec),)
        for n in analysis.graph.nodes
        for kind, pins in (
            (NodeKind.INPUT, request.pins),
            (NodeKind.OUTPUT, request.output_pins),
        )
        if n.kind is kind and (spec := pins.get(n.slot)) is not None
    }
    for value, pin in request.value_pins.items():
        port = analysis.graph.held.get(value)
        if port is not None:
            pinned[port.node] = (*pinned.get(port.node, ()), (port.result, pin.spec))
    slower = request.corrections.communication
    target = (
        analysis.target if slower == 1.0 else analysis.target.with_slower_links(slower)
    )
    mesh = lay_out(target, mesh_axes)
    if request.density != "all":
        mesh = replace(mesh, lowering=mesh.lowering.without_waypoints())
    return _on(analysis, mesh, pinned, request)


def _on(
    analysis: ProgramAnalysis,
    mesh: LaidMesh,
    pinned: dict[int, NodePin],
    request: Request,
) -> MeshProblem:
    def narrow(builder: OptionBuilder) -> tuple[list[Options], bool]:
        has_few, graph = len(mesh.long) <= 2, analysis.graph
        if not has_few and least_cells(builder) > CONSTANTS.most_cells:
            seeds = _seeds(analysis, mesh, request)
            builder.centres = centres_of(graph, mesh.long, seeds)
            return neighbourhood(builder, builder.build(), seeds), True
        options = builder.build()
        if has_few or count_cells(graph, options) <= CONSTANTS.most_cells:
            return options, False
        seeds = _seeds(analysis, mesh, request)
        return neighbourhood(builder, options, seeds), True

    budget = request.memory_budget_bytes
    watch = request.watch
    corrections = request.corrections
    model = PRICE.run(watch, analysis, mesh, pinned, budget, narrow, corrections)
    return FOLD.run(watch, model, request.density)


def _seeds(analysis: ProgramAnalysis, mesh: LaidMesh, request: Request) -> list[Seed]:
    """Return plans of coarser meshes, in which several axes are joined into one: the
    best of each, and all recipes of the first. Pins do not apply there, since they may
    name one of the joined axes."""
    seeds: list[Seed] = []
    request = replace(request, watch=None)  # Only candidate meshes are dumped.
    effort = replace(EFFORTS["fast"], seed=request.seed, deadline=request.deadline)
    for places in groupings(len(mesh.long)):
        groups = tuple(tuple(mesh.long[k] for k in group) for group in places)
        if seeds and time.monotonic() > request.deadline:
            break
        joined = taken_together(mesh, groups)
        mesh_problem = _on(analysis, joined, {}, request)
        if not seeds:
            of_recipes = replace(RECIPE_EFFORTS["fast"], deadline=request.deadline)
            mesh_problem = with_recipes(mesh_problem, of_recipes)
            known = [x for x in mesh_problem.recipes.values() if x is not None]
            seeds += [Seed(mesh_problem.model, labels, groups) for labels in known]
        else:
            known = first_choices(mesh_problem)
        labels = solve_mesh_problem(mesh_problem, known, effort).labels
        if labels is not None:
            seeds.append(Seed(mesh_problem.model, labels, groups))
    return seeds
