"""The error where nothing fits: culprits, the smallest peak, and the nearest fix."""

from __future__ import annotations

from collections import defaultdict

from rhino_jax.analysis.graph import NodeKind
from rhino_jax.errors import InfeasiblePlanError
from rhino_jax.ir.program import Program
from rhino_jax.ir.spec import format_spec
from rhino_jax.model.build import MeshModel, build_model
from rhino_jax.planner.search.folding import minimum_memory
from rhino_jax.planner.search.limits import LIMITS
from rhino_jax.planner.search.read_back.extract import live_at
from rhino_jax.planner.search.records import MeshProblem, Request
from rhino_jax.solver.least_peak import minimum_peak
from rhino_jax.units import format_bytes


def explain(
    mesh_problem: MeshProblem, request: Request, program: Program
) -> InfeasiblePlanError:
    """Return the error to raise where no choice fits the budget."""
    model = mesh_problem.model
    problem = model.problem
    labels = minimum_memory(mesh_problem)
    peak = problem.peak(labels)
    axes = ", ".join(f"{a.name}={a.size}" for a in model.mesh.axes)
    held = live_at(model, labels, problem.peak_time(labels), most=3)
    holdings = "; ".join(
        f"{h.what} {format_bytes(h.bytes)}" + (f" ({h.place})" if h.place else "")
        for h in held
    )
    budget = request.budget_text
    culprits, fixes = _costly_pins(model, request, peak)
    if model.is_narrowed:
        fixes.append(
            "give a mesh of at most two axes (on this one, only options near to plans"
            " with fewer axes were tried)"
        )
    least = request.budget_for(peak)
    fixes += [
        f"raise memory_budget_bytes to {least} ({format_bytes(least)})",
        "use more devices, a smaller batch, or jax.checkpoint on the layers",
    ]
    return InfeasiblePlanError(
        f"`{program.name}`: no plan fits the memory budget on mesh ({axes}).",
        where="; ".join([*culprits, budget]),
        numbers=(
            f"smallest peak found {format_bytes(peak)} of"
            f" {format_bytes(problem.limit)}, {format_bytes(peak - problem.limit)}"
            f" more; largest at that peak: {holdings}"
        ),
        fix="; or ".join(fixes) + ".",
        smallest_peak_bytes=least,
    )


def _costly_pins(
    model: MeshModel, request: Request, peak: float
) -> tuple[list[str], list[str]]:
    """Return the pins that raise the smallest peak, costliest first, and fixes."""
    if model.is_narrowed or not request.names_pins:
        return [], []  # Narrowed models have too many options to try every pin.
    budget, pinned = model.problem.limit, model.builder.pinned
    found: list[tuple[float, str]] = []
    for name, nodes in list(_nodes_of_pins(model, request).items())[: LIMITS.most_pins]:
        others = {n: pin for n, pin in pinned.items() if n not in nodes}
        problem = build_model(model.analysis, model.mesh, others, budget).problem
        without = problem.peak(minimum_peak(problem))
        if without < 0.999 * peak:
            found.append((without, name))
    found.sort()
    fixes = [
        f"drop the {name} (smallest peak then {format_bytes(without)})"
        for without, name in found[:1]
    ]
    return [name for _, name in found], fixes


def _nodes_of_pins(model: MeshModel, request: Request) -> dict[str, set[int]]:
    """Return the text of each pin → the nodes that it pins."""
    graph, names = model.graph, model.mesh.names
    found: dict[str, set[int]] = defaultdict(set)
    for node in graph.nodes:
        if node.kind is NodeKind.INPUT and node.slot in request.pins:
            path = graph.program.inputs[node.slot].path
            spec = format_spec(request.pins[node.slot], names)
            found[f"pin {path} = {spec}"].add(node.id)
    for value, pin in request.value_pins.items():
        if (port := graph.held.get(value)) is not None:
            found[f"pin {pin.key} = {format_spec(pin.spec, names)}"].add(port.node)
    return found
