"""Why nothing fits: the culprits, the smallest peak, and the nearest fix."""

from __future__ import annotations

import math
from collections.abc import Mapping

from rhino_jax.errors import InfeasiblePlanError
from rhino_jax.ir.program import Program
from rhino_jax.ir.spec import Spec, format_spec
from rhino_jax.search.build import Model, build_model
from rhino_jax.search.extract import live_at
from rhino_jax.search.graph import NodeKind
from rhino_jax.search.least_peak import smallest_peak
from rhino_jax.search.solve import Solution
from rhino_jax.units import format_bytes


MOST_PINS = 8
"""Pins that are tried one by one; each costs a search for the smallest peak."""


def explain(
    model: Model,
    solution: Solution,
    pins: Mapping[int, Spec],
    program: Program,
) -> InfeasiblePlanError:
    """The error to raise where no choice fits the budget."""
    problem = model.problem
    labels = smallest_peak(problem)
    peak = min(problem.peak(labels), solution.smallest_peak)
    axes = ", ".join(f"{a.name}={a.size}" for a in model.mesh.axes)
    held = live_at(model, labels, problem.peak_time(labels), most=3)
    holdings = "; ".join(
        f"{h.what} {format_bytes(h.bytes)}" + (f" ({h.place})" if h.place else "")
        for h in held
    )
    budget = f"memory budget {format_bytes(problem.limit)} per device"
    culprits, fixes = _costly_pins(model, pins, program, peak)
    if model.is_narrowed:
        fixes.append(
            "give a mesh of at most two axes (on this one, only options near to plans"
            " with fewer axes were tried)"
        )
    least = math.ceil(peak)
    fixes += [
        f"raise memory_budget_bytes to {least} ({format_bytes(least)})",
        "use more devices, a smaller batch, or jax.checkpoint on the layers",
    ]
    return InfeasiblePlanError(
        f"`{program.name}`: no plan fits the memory budget on mesh ({axes}).",
        where="; ".join([*culprits, budget]),
        numbers=(
            f"smallest peak found {format_bytes(peak)} of"
            f" {format_bytes(problem.limit)}; largest at that peak: {holdings}"
        ),
        fix="; or ".join(fixes) + ".",
    )


def _costly_pins(
    model: Model,
    pins: Mapping[int, Spec],
    program: Program,
    peak: float,
) -> tuple[list[str], list[str]]:
    """Pins without which the smallest peak is lower, the costliest first."""
    if model.is_narrowed:
        return [], []  # all options are too many to be tried once for every pin
    budget = model.problem.limit
    slots = {n.slot: n.id for n in model.graph.nodes if n.kind is NodeKind.INPUT}
    found: list[tuple[float, str]] = []
    for slot, spec in list(pins.items())[:MOST_PINS]:
        others = {slots[s]: p for s, p in pins.items() if s != slot and s in slots}
        problem = build_model(model.study, model.mesh, others, budget).problem
        without = problem.peak(smallest_peak(problem))
        if without < 0.999 * peak:
            path = program.inputs[slot].path
            name = f"pin {path} = {format_spec(spec, model.mesh.names)}"
            found.append((without, name))
    found.sort()
    fixes = [
        f"drop the {name} (smallest peak then {format_bytes(without)})"
        for without, name in found[:1]
    ]
    return [name for _, name in found], fixes
