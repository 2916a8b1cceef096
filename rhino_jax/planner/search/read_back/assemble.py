"""The plan of a solution, with notes on what is unusual or was left out; or the error
where nothing fits: culprits, the smallest peak, and the nearest fix.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from rhino_jax.analysis.graph import NodeKind
from rhino_jax.analysis.padding import padding_notes
from rhino_jax.errors import InfeasiblePlanError
from rhino_jax.hardware.target import Target
from rhino_jax.ir.coverage import coverage_shares
from rhino_jax.ir.program import USERS_CONSTRAINT, Program, item_bytes
from rhino_jax.ir.spec import Spec, axes_text, format_spec, local_shape
from rhino_jax.model.build import MeshModel, build_model
from rhino_jax.plan.decisions import (
    Decisions,
    only_around_matmuls,
    only_the_batch,
    without_split_views,
)
from rhino_jax.plan.fingerprint import fingerprint
from rhino_jax.plan.plan import Leaf, PlanData
from rhino_jax.plan.records import (
    CUT_BY_CLOCK,
    Collective,
    Coverage,
    Predicted,
    SearchReport,
)
from rhino_jax.plan.stages import StagePlan
from rhino_jax.planner.search.folding import minimum_memory, solved_by
from rhino_jax.planner.search.read_back.extract import (
    decisions_of,
    line_times,
    live_at,
    predicted_of,
    timeline,
)
from rhino_jax.planner.search.read_back.traffic import ChoiceTraffic
from rhino_jax.planner.search.records import LIMITS, MeshProblem, Request, SolvedMesh
from rhino_jax.solver.least_peak import minimum_peak
from rhino_jax.solver.parameters import PAIRWISE
from rhino_jax.units import format_bytes


def _of_the_search(target: Target, found: SolvedMesh) -> list[str]:
    model, notes = found.model, []
    if found.is_fallback:
        notes.append(
            f"{CUT_BY_CLOCK} was over before the search began: this is the best recipe."
        )
    elif found.is_cut or found.mesh_problem.is_cut:
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
    return notes


def _by_hand(program: Program, mesh_axes: tuple[tuple[str, int], ...]) -> list[str]:
    """Note what is not known of code that its user sharded with `shard_map`."""
    notes = []
    for op in program.ops:
        if op.manual is None:
            continue
        axes = axes_text(op.manual.mesh_axes)
        if op.manual.mesh_axes != mesh_axes:
            notes.append(
                f"shard_map at {op.source} is over another mesh ({axes}) than the plan:"
                " its operands are replicated on every device."
            )
        elif not op.manual.is_all_priced:
            notes.append(
                f"not all that shard_map at {op.source} sends itself has a known cost:"
                " its shapes, or its loops, do not tell it."
            )
    return list(dict.fromkeys(notes))


def explain(mesh_problem: MeshProblem, request: Request) -> InfeasiblePlanError:
    """Return the error to raise where no choice fits the budget."""
    model = mesh_problem.model
    problem, program = model.problem, model.graph.program
    least = solved_by(mesh_problem, minimum_memory(mesh_problem))
    peak = least.solution.peak
    axes = ", ".join(f"{a.name}={a.size}" for a in model.mesh.axes)
    held = live_at(least, problem.peak_time(least.labels), most=3)
    holdings = "; ".join(
        f"{h.what} {format_bytes(h.bytes)}" + (f" ({h.place})" if h.place else "")
        for h in held
    )
    # The pins that raise the smallest peak, costliest first. Narrowed models have too
    # many options to try every pin.
    pinned: dict[str, set[int]] = defaultdict(set)
    graph, names = model.graph, model.mesh.names
    for node in graph.nodes:
        if node.kind is NodeKind.INPUT and node.slot in request.pins:
            path = program.inputs[node.slot].path
            spec = format_spec(request.pins[node.slot], names)
            pinned[f"pin {path} = {spec}"].add(node.id)
    for value, pin in request.value_pins.items():
        if (port := graph.held.get(value)) is not None:
            pinned[f"pin {pin.key} = {format_spec(pin.spec, names)}"].add(port.node)
    is_tried = request.names_pins and not model.is_narrowed
    culprits: list[tuple[float, str]] = []
    for name, nodes in [*pinned.items()][: LIMITS.most_pins] if is_tried else ():
        others = {n: p for n, p in model.builder.pinned.items() if n not in nodes}
        freer = build_model(model.analysis, model.mesh, others, problem.limit).problem
        without = freer.peak(minimum_peak(freer))
        if without < 0.999 * peak:
            culprits.append((without, name))
    culprits.sort()
    fixes = [
        f"drop the {name} (smallest peak then {format_bytes(without)})"
        for without, name in culprits[:1]
    ]
    if model.is_narrowed:
        fixes.append(
            "give a mesh of at most two axes (on this one, only options near to plans"
            " with fewer axes were tried)"
        )
    enough = request.budget_for(peak)
    fixes += [
        f"raise memory_budget_bytes to {enough} ({format_bytes(enough)})",
        "use more devices, a smaller batch, or jax.checkpoint on the layers",
    ]
    return InfeasiblePlanError(
        f"`{program.name}`: no plan fits the memory budget on mesh ({axes}).",
        where="; ".join([*(name for _, name in culprits), request.budget_text]),
        numbers=(
            f"smallest peak found {format_bytes(peak)} of"
            f" {format_bytes(problem.limit)}, {format_bytes(peak - problem.limit)}"
            f" more; largest at that peak: {holdings}"
        ),
        fix="; or ".join(fixes) + ".",
        smallest_peak_bytes=enough,
    )


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
    mesh_problem, model = found.mesh_problem, found.model
    program = model.graph.program
    if found.solution.labels is None:
        raise explain(mesh_problem, request)
    decisions = decisions_by(found, request)
    predicted, collectives, peak_time = costs_of(found)
    mesh_axes = tuple((a.name, a.size) for a in model.mesh.axes)
    ops, flops, size, unknown = coverage_shares(program)
    notes = [
        *_of_the_search(target, found),
        *padding_notes(program, decisions.values, model.mesh),
    ]
    if unknown:
        listed = ", ".join(f"{n} ({c})" for n, c in unknown.items())
        notes.append(f"replicated for want of a rule: {listed}.")
    notes += _by_hand(program, mesh_axes)
    if own := sum(op.name == USERS_CONSTRAINT for op in program.ops):
        notes.append(
            f"sharding constraints that the program says itself: {own}; the plan takes"
            " their place. Write rhino.pin(x, spec) in its stead where a layout must"
            " stay."
        )
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
        at_peak=live_at(found, peak_time),
        pins=pins_text(program, request, model.mesh.names),
        meshes=meshes,
        transforms=program.transforms,
        corrections=request.corrections,
        line_times=line_times(found, predicted, collectives),
        timeline=timeline(found, collectives),
        notes=(*notes,),
    )


def decisions_by(found: SolvedMesh, request: Request) -> Decisions:
    """Return the specs of the annotated values: all, or as few as the density says, and
    those that are pinned."""
    model, density = found.model, found.mesh_problem.density
    every = decisions = decisions_of(found)
    if density == "matmul":
        decisions = only_around_matmuls(model.graph.program, every)
    elif density == "batch":
        graph, roles, led = model.graph, model.analysis.roles, set[int]()
        for value, port in graph.held.items():
            dims = model.dim_classes.results(graph.nodes[port.node], port.result)
            if dims and dims[0] in roles.batch:
                led.add(value)
        decisions = only_the_batch(graph.program, every, led)
    else:
        _, lanes = model.builder.target.device.tile or (0, 0)
        decisions = without_split_views(model.graph.program, every, lanes)
    # Pinned values are annotated at any density.
    annotated = {v: every.values[v] for v in request.value_pins if v in every.values}
    return replace(decisions, values={**decisions.values, **annotated})


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


def costs_of(found: SolvedMesh) -> tuple[Predicted, tuple[Collective, ...], int]:
    """Return a choice's predictions, its collectives, and the time of its peak."""
    mesh_problem, model, labels = found.mesh_problem, found.model, found.labels
    overlap, symmetry = mesh_problem.folded, mesh_problem.symmetry
    choice = symmetry.contract(labels)
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
        on_host=value.on_host,
    )
