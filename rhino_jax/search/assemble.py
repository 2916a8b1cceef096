"""A choice read back as a Plan."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace

from rhino_jax.analysis.padding import padding_notes
from rhino_jax.hardware.target import Target
from rhino_jax.ir.coverage import coverage_shares
from rhino_jax.ir.program import USERS_CONSTRAINT, Program, item_bytes
from rhino_jax.ir.spec import Spec, format_spec, local_shape
from rhino_jax.model.build import Model
from rhino_jax.optimize.incumbents import OPTIMAL_GAP
from rhino_jax.plan.decisions import Decisions
from rhino_jax.plan.density import only_around_matmuls, only_the_batch
from rhino_jax.plan.fingerprint import fingerprint
from rhino_jax.plan.plan import Leaf, Plan
from rhino_jax.plan.records import CUT_BY_CLOCK, Coverage, Predicted, SearchReport
from rhino_jax.plan.stages import StagePlan
from rhino_jax.search.extract import (
    decisions_of,
    led_by_batch,
    live_at,
    predicted_of,
)
from rhino_jax.search.infeasible import explain
from rhino_jax.search.records import Request, SolvedMesh
from rhino_jax.search.traffic import ChoiceTraffic


def assemble(
    target: Target,
    request: Request,
    found: SolvedMesh,
    started: float,
    meshes: tuple[tuple[tuple[int, ...], float], ...],
) -> Plan:
    mesh_problem, solution = found.mesh_problem, found.solution
    model, symmetry = mesh_problem.model, mesh_problem.symmetry
    program = model.graph.program
    if solution.labels is None:
        raise explain(model, solution, request, program)
    mesh_axes = tuple((a.name, a.size) for a in model.mesh.axes)
    labels = solution.labels
    decisions = decisions_of(model, labels)
    if mesh_problem.density == "matmul":
        decisions = only_around_matmuls(program, decisions)
    elif mesh_problem.density == "batch":
        decisions = only_the_batch(program, decisions, led_by_batch(model))
    decisions = _with_pins(decisions, decisions_of(model, labels), request)
    names = model.mesh.names
    notes: list[str] = []
    if found.is_fallback:
        notes.append(
            f"{CUT_BY_CLOCK} was over before the search began: this is the best recipe."
        )
    elif found.is_cut or mesh_problem.is_cut:
        notes.append(
            f"{CUT_BY_CLOCK} ended the search: with more time, on another machine or"
            " beside other work, another plan may be found."
        )
    idle = (target.num_devices or 0) - model.mesh.num_devices
    if idle > 0:
        notes.append(
            f"the mesh has {model.mesh.num_devices} devices, {target.name}"
            f" {target.num_devices}: {idle} stay idle."
        )
    if model.is_narrowed:
        notes.append(
            "on a mesh of so many axes only what is near to plans with fewer axes was"
            " searched; the gap counts nothing else."
        )
    notes += padding_notes(program, decisions.values, model.mesh)
    recipes: dict[str, Predicted | None] = {}
    folded = ChoiceTraffic.folded(model, symmetry)
    overlap, traffic, choice = mesh_problem.folded, folded, symmetry.contract(labels)
    # Where repeats choose alike, one of each says it all.
    if (symmetry.expand(choice) != labels).any():
        overlap, traffic, choice = mesh_problem.overlap, ChoiceTraffic.of(model), labels
    for name, known in mesh_problem.recipes.items():
        recipes[name] = (
            None
            if known is None
            else predicted_of(mesh_problem.folded, folded, symmetry.contract(known))
        )
    ops, flops, size, unknown = coverage_shares(program)
    if unknown:
        listed = ", ".join(f"{n} ({c})" for n, c in unknown.items())
        notes.append(f"replicated for want of a rule: {listed}.")
    notes += _notes_by_hand(program, mesh_axes)
    own = sum(op.name == USERS_CONSTRAINT for op in program.ops)
    if own:
        notes.append(
            f"sharding constraints that the program says itself: {own}; the plan takes"
            " their place. Write rhino.pin(x, spec) in its stead where a layout must"
            " stay."
        )
    status = "optimal" if solution.gap <= OPTIMAL_GAP else "feasible"
    predicted = predicted_of(overlap, traffic, choice)
    return Plan(
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
                devices=tuple(range(model.mesh.num_devices)),
                decisions=decisions,
                predicted=predicted,
            ),
        ),
        predicted=predicted,
        collectives=traffic.collectives(choice),
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
        at_peak=live_at(model, labels, overlap.problem.peak_time(choice)),
        pins=_pins_text(program, request, names),
        meshes=meshes,
        transforms=program.transforms,
        notes=tuple(notes),
    )


def _notes_by_hand(
    program: Program, mesh_axes: tuple[tuple[str, int], ...]
) -> list[str]:
    """What is not known of code that its user cut by hand."""
    notes = []
    for op in program.ops:
        if op.manual is None:
            continue
        axes = ", ".join(f"{n}={s}" for n, s in op.manual.mesh_axes)
        if op.manual.mesh_axes != mesh_axes:
            notes.append(
                f"shard_map at {op.source} is over another mesh ({axes}) than the plan:"
                " every device holds its operands whole."
            )
        elif not op.manual.is_all_priced:
            notes.append(
                f"not all that shard_map at {op.source} sends itself is priced: its"
                " shapes, or its loops, do not say how much that is."
            )
    return list(dict.fromkeys(notes))


def _with_pins(decisions: Decisions, every: Decisions, request: Request) -> Decisions:
    """What is pinned is annotated, however little else is."""
    annotated = {v: every.values[v] for v in request.value_pins if v in every.values}
    return replace(decisions, values={**decisions.values, **annotated})


def _pins_text(
    program: Program, request: Request, names: Sequence[str]
) -> dict[str, str]:
    """Tree path, source line or scope → spec."""
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
