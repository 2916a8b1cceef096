"""The plan of a solution."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace

from rhino_jax.hardware.target import Target
from rhino_jax.ir.coverage import coverage_shares
from rhino_jax.ir.program import Program, item_bytes
from rhino_jax.ir.spec import Spec, format_spec, local_shape
from rhino_jax.model.build import MeshModel
from rhino_jax.plan.decisions import (
    Decisions,
    only_around_matmuls,
    only_the_batch,
    without_split_views,
)
from rhino_jax.plan.fingerprint import fingerprint
from rhino_jax.plan.plan import Leaf, PlanData
from rhino_jax.plan.records import Collective, Coverage, Predicted, SearchReport
from rhino_jax.plan.stages import StagePlan
from rhino_jax.planner.search.read_back.extract import (
    decisions_of,
    led_by_batch,
    live_at,
    predicted_of,
)
from rhino_jax.planner.search.read_back.infeasible import explain
from rhino_jax.planner.search.read_back.line_times import line_times, timeline
from rhino_jax.planner.search.read_back.notes import notes_of
from rhino_jax.planner.search.read_back.traffic import ChoiceTraffic
from rhino_jax.planner.search.records import MeshProblem, Request, SolvedMesh
from rhino_jax.solver.parameters import PAIRWISE
from rhino_jax.solver.problem import Labels


def assemble(
    target: Target,
    request: Request,
    found: SolvedMesh,
    started: float,
    meshes: tuple[tuple[tuple[int, ...], float], ...],
) -> PlanData:
    """Return the plan of the solution on one mesh.

    Args:
      target: the hardware.
      request: the options of the search.
      found: the solved mesh.
      started: `time.monotonic()` when the search began.
      meshes: shapes and objectives of the candidate meshes.
    Raises:
      InfeasiblePlanError: nothing fits.
    """
    mesh_problem, solution = found.mesh_problem, found.solution
    model = mesh_problem.model
    program = model.graph.program
    if solution.labels is None:
        raise explain(mesh_problem, request, program)
    labels = solution.labels
    decisions = decisions_by(mesh_problem, labels, request)
    predicted, collectives, peak_time = costs_of(mesh_problem, labels)
    mesh_axes = tuple((a.name, a.size) for a in model.mesh.axes)
    ops, flops, size, unknown = coverage_shares(program)
    return PlanData(
        program_name=program.name,
        fingerprint=fingerprint(program, mesh_axes),
        mesh_axes=mesh_axes,
        hardware=target.name,
        inputs=tuple(
            replace(
                _leaf(program, e.value, e.path, decisions.values.get(e.value), model),
                is_donated=e.is_donated,
            )
            for e in program.inputs
        ),
        outputs=tuple(
            _leaf(program, e.value, e.path, spec, model)
            for e, spec in zip(program.outputs, decisions.outputs, strict=True)
        ),
        stages=(
            StagePlan(
                mesh_axes=mesh_axes,
                devices=tuple(range(math.prod(size for _, size in mesh_axes))),
                decisions=decisions,
                predicted=predicted,
            ),
        ),
        predicted=predicted,
        collectives=collectives,
        search=_report(found, request, started),
        coverage=Coverage(
            ops, flops, size, tuple(sorted(unknown.items(), key=lambda u: -u[1]))
        ),
        recipes=recipes_of(mesh_problem),
        memory_budget_bytes=request.whole_budget_bytes,
        at_peak=live_at(model, labels, peak_time),
        pins=pins_text(program, request, model.mesh.names),
        meshes=meshes,
        transforms=program.transforms,
        corrections=request.corrections,
        line_times=line_times(model, labels, predicted, collectives),
        timeline=timeline(model, labels, collectives),
        notes=notes_of(target, found, decisions, unknown),
    )


def decisions_by(
    mesh_problem: MeshProblem, labels: Labels, request: Request
) -> Decisions:
    """Return the specs of the annotated values: all, or as few as the density says, and
    those that are pinned."""
    model = mesh_problem.model
    every = decisions = decisions_of(model, labels)
    if mesh_problem.density == "matmul":
        decisions = only_around_matmuls(model.graph.program, every)
    elif mesh_problem.density == "batch":
        decisions = only_the_batch(model.graph.program, every, led_by_batch(model))
    else:
        _, lanes = model.builder.target.device.tile or (0, 0)
        decisions = without_split_views(model.graph.program, every, lanes)
    return _with_pins(decisions, every, request)


def recipes_of(mesh_problem: MeshProblem) -> dict[str, Predicted | None]:
    """Return the predictions for the recipes; None for those that do not apply."""
    symmetry, folded = mesh_problem.symmetry, mesh_problem.folded
    traffic = ChoiceTraffic.folded(mesh_problem.model, symmetry)
    return {
        name: None
        if known is None
        else predicted_of(folded, traffic, symmetry.contract(known))
        for name, known in mesh_problem.recipes.items()
    }


def costs_of(
    mesh_problem: MeshProblem, labels: Labels
) -> tuple[Predicted, tuple[Collective, ...], int]:
    """Return a choice's predictions, its collectives, and the time of its peak."""
    model, symmetry = mesh_problem.model, mesh_problem.symmetry
    overlap, choice = mesh_problem.folded, symmetry.contract(labels)
    # Where repeated nodes share a choice, one node of each orbit is enough.
    if (symmetry.expand(choice) == labels).all():
        traffic = ChoiceTraffic.folded(model, symmetry)
    else:
        overlap, traffic, choice = mesh_problem.overlap, ChoiceTraffic.of(model), labels
    return (
        predicted_of(overlap, traffic, choice),
        traffic.collectives(choice),
        overlap.problem.peak_time(choice),
    )


def _report(found: SolvedMesh, request: Request, started: float) -> SearchReport:
    solution = found.solution
    status = "optimal" if solution.gap <= PAIRWISE.optimal_gap else "feasible"
    return SearchReport(
        status="recipe" if found.is_fallback else status,
        objective_s=solution.objective,
        bound_s=solution.bound,
        gap=solution.gap,
        seconds=time.monotonic() - started,
        variables=solution.variables,
        level=request.level,
        nodes=solution.nodes,
        reserve_share=request.reserve_share,
    )


def _with_pins(decisions: Decisions, every: Decisions, request: Request) -> Decisions:
    """Add the specs of pinned values, which are annotated at any density."""
    annotated = {v: every.values[v] for v in request.value_pins if v in every.values}
    return replace(decisions, values={**decisions.values, **annotated})


def pins_text(
    program: Program, request: Request, names: Sequence[str]
) -> dict[str, str]:
    """Return the user's pins as text: tree path, source line or scope → spec."""
    shown = {
        program.inputs[slot].path: format_spec(spec, names)
        for slot, spec in request.pins.items()
    }
    for slot, spec in request.output_pins.items():
        shown[program.outputs[slot].path] = format_spec(spec, names)
    for pin in request.value_pins.values():
        shown[pin.key] = format_spec(pin.spec, names)
    return shown


def _leaf(
    program: Program, value_id: int, path: str, spec: Spec | None, model: MeshModel
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
