"""The sections of a plan's report, for text and HTML."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rhino_jax.explain.report.line import format_mesh, num_devices
from rhino_jax.explain.report.section import Section, Table, first_rows
from rhino_jax.explain.report.stages import stage_sections
from rhino_jax.explain.report.tables import (
    by_line,
    collective_sections,
    utilisation,
    value_sections,
)
from rhino_jax.units import (
    format_bytes,
    format_count,
    format_flops,
    format_ratio,
    format_seconds,
    format_share,
)


if TYPE_CHECKING:
    from rhino_jax.plan.plan import PlanData
    from rhino_jax.plan.records import Predicted

TOP_HOLDINGS = 10
TOP_MESHES = 8


def tell(plan: PlanData, *, full: bool = False) -> tuple[Section, ...]:
    """Return all sections of a plan's report.

    Args:
      plan: the plan.
      full: leave nothing out and fold nothing.
    """
    sections = [
        _head(plan),
        *stage_sections(plan),
        by_line(plan, full=full),
        _recipes(plan),
        *value_sections(plan, full=full),
        *collective_sections(plan, full=full),
        _memory(plan, full=full),
        _meshes(plan, full=full),
        _variants(plan),
        _refined(plan),
        Section("pins", facts=tuple(plan.pins.items())),
        _while_loops(plan),
        _coverage(plan),
        _search(plan),
        Section("notes", lines=plan.notes),
    ]
    return tuple(s for s in sections if not s.is_empty)


def _head(plan: PlanData) -> Section:
    predicted, known = plan.predicted, plan.corrections
    devices = num_devices(plan.mesh_axes)
    share = predicted.peak_bytes / max(1, plan.memory_budget_bytes)
    return Section(
        f"plan of {plan.program_name}",
        facts=(
            (
                "mesh",
                f"{format_mesh(plan.mesh_axes)} ({format_count(devices)} devices)",
            ),
            ("hardware", plan.hardware),
            (
                "step time",
                f"{format_seconds(predicted.step_time_s)}: {_parts(plan)}",
            ),
            (
                "peak memory",
                f"{format_bytes(predicted.peak_bytes)} per device, of"
                f" {format_bytes(plan.memory_budget_bytes)} ({format_share(share)})"
                f"{_reserve(plan)}",
            ),
            ("per device", f"{format_flops(predicted.flops_per_device)} per step"),
            *utilisation(plan),
            *_transforms(plan),
            *([("costs", f"corrected by {known}")] if known.programs else []),
            ("fingerprint", plan.fingerprint[:16]),
        ),
    )


def _parts(plan: PlanData) -> str:
    """Return compute and exposed communication, of the busiest stage if several."""
    compute, rest = map(
        format_seconds, (plan.predicted.compute_s, plan.predicted.communication_s)
    )
    if plan.has_tasks:
        return (
            f"the busiest stage computes {compute}, and waits {rest} for other stages"
            " and for collectives"
        )
    return f"compute {compute}, communication not hidden {rest}"


def _reserve(plan: PlanData) -> str:
    """Say how much memory is reserved, if the peak exceeds half of the budget."""
    left = plan.memory_budget_bytes - plan.usable_bytes
    if not left or 2 * plan.predicted.peak_bytes < plan.memory_budget_bytes:
        return ""
    return (
        f", {format_bytes(left)} left free: compiled programs hold up to"
        f" {format_share(plan.search.reserve_share)} of it more than predicted"
    )


def _transforms(plan: PlanData) -> tuple[tuple[str, str], ...]:
    """Return the fact on program passes before planning; empty without any."""
    if not plan.transforms:
        return ()
    done = [
        f"{t.name} ({format_count(t.ops_before)} → {format_count(t.ops_after)} ops)"
        for t in plan.transforms
    ]
    return (("transforms", ", ".join(done)),)


def _recipes(plan: PlanData) -> Section:
    """Return the section of plan and recipes, fastest first, impossible last."""
    known = [(name, cost) for name, cost in plan.recipes.items() if cost is not None]
    known.sort(key=lambda entry: entry[1].step_time_s)
    if not plan.recipes:
        return Section("")
    entries = [("this plan", plan.predicted), *known]
    rows = [_recipe_row(plan, name, cost) for name, cost in entries]
    rows += [
        (name, "-", "-", "-", "-", "not possible here")
        for name, cost in plan.recipes.items()
        if cost is None
    ]
    slowest_s = max(cost.step_time_s for _, cost in entries)
    shares = [cost.step_time_s / slowest_s if slowest_s else 0.0 for _, cost in entries]
    shares += [0.0] * (len(rows) - len(shares))
    header = ("plan", "step time", "to this", "communication", "peak", "fits")
    return Section(
        "compared with the experts' recipes",
        table=Table(header, tuple(rows), "<>>>><", (0,), tuple(shares), frozenset({0})),
    )


def _recipe_row(plan: PlanData, name: str, cost: Predicted) -> tuple[str, ...]:
    is_fitting = cost.peak_bytes <= plan.usable_bytes
    return (
        name,
        format_seconds(cost.step_time_s),
        _ratio(cost.step_time_s, plan.predicted.step_time_s),
        format_seconds(cost.communication_s),
        format_bytes(cost.peak_bytes),
        "yes" if is_fitting else "no: over budget",
    )


def _ratio(value: float, to: float) -> str:
    return format_ratio(value / to) if to else "-"


def _memory(plan: PlanData, *, full: bool) -> Section:
    total = max(1, plan.predicted.peak_bytes)
    rows = tuple(
        (
            h.what,
            h.shard,
            h.spec,
            format_bytes(h.bytes),
            format_share(h.bytes / total),
            h.source,
        )
        for h in plan.at_peak
    )
    peak = format_bytes(plan.predicted.peak_bytes)
    table = Table(
        ("what", "shard", "spec", "bytes", "share", "source"),
        rows,
        "<<<>><",
        (0, 2, 5),
        tuple(h.bytes / total for h in plan.at_peak),
    )
    return first_rows(
        f"memory at the peak: {peak} of {format_bytes(plan.memory_budget_bytes)} per"
        " device",
        table,
        None if full else TOP_HOLDINGS,
        [h.bytes for h in plan.at_peak],
        format_bytes,
    )


def _variants(plan: PlanData) -> Section:
    """Return the section comparing micro-batches, remat and offload."""
    rows = tuple(
        (
            v.name,
            f"{'≤ ' * v.is_brief}{format_seconds(v.step_time_s)}"
            if math.isfinite(v.step_time_s)
            else "-",
            format_bytes(v.peak_bytes),
            "yes" if math.isfinite(v.step_time_s) else "no: over budget",
        )
        for v in plan.variants
    )
    is_brief = any(v.is_brief and math.isfinite(v.step_time_s) for v in plan.variants)
    return Section(
        "forms, micro-batches, remat and offload compared",
        table=Table(
            ("program", "step time", "peak", "fits"),
            rows,
            "<>><",
            (0,),
            (),
            frozenset(i for i, v in enumerate(plan.variants) if v.is_chosen),
        ),
        lines=("≤: searched briefly.",) * is_brief,
    )


def _meshes(plan: PlanData, *, full: bool) -> Section:
    """Return the section of mesh shapes, by the search, and the plan's own step."""
    axes = plan.stages[0].mesh_axes
    names, chosen = [name for name, _ in axes], tuple(size for _, size in axes)
    entries = sorted(plan.meshes, key=lambda x: x[1])
    shown = entries if full else entries[:TOP_MESHES]
    best_s = min((s for _, s in entries), default=0.0)
    own = format_seconds(plan.predicted.step_time_s)
    rows: list[tuple[str, ...]] = []
    for shape, objective_s in shown:
        label = " × ".join(str(size) for size in shape)
        if len(shape) == len(names):
            label = format_mesh(tuple(zip(names, shape, strict=True)))
        compared = format_seconds(objective_s), _ratio(objective_s, best_s)
        if not math.isfinite(objective_s):
            compared = "does not fit", "-"
        rows.append((label, *compared, own if shape == chosen else ""))
    marked = frozenset(i for i, (shape, _) in enumerate(shown) if shape == chosen)
    rest = len(entries) - len(shown)
    lines = [f"and {rest} more, slower"] if rest else []
    header: tuple[str, ...] = ("mesh", "compared by", "to best", "step time")
    align = "<>>>"
    if all(rows[i][1] == own for i in marked):
        rows = [row[:-1] for row in rows]
        header, align = ("mesh", "step time", "to best"), "<>>"
    else:
        done = "before passes were chosen, " if plan.variants else ""
        lines.append(f"compared by the step that a brief search finds, {done}of each.")
    table = Table(header, tuple(rows), align, (0,), (), marked)
    return Section("mesh shapes compared", table=table, lines=tuple(lines))


def _refined(plan: PlanData) -> Section:
    """Return the section on the candidate plans that were compiled, fastest first."""
    entries = sorted(plan.refined, key=lambda c: (not c.is_fitting, c.compiled_s))
    rows = tuple(
        (
            c.name,
            " × ".join(map(str, c.mesh)),
            format_seconds(c.predicted_s),
            format_seconds(c.compiled_s),
            format_bytes(c.peak_bytes),
            "yes" if c.is_fitting else "no: over budget",
        )
        for c in entries
    )
    header = ("plan", "mesh", "predicted", "compiled", "compiled peak", "fits")
    return Section(
        "requested of the compiler",
        table=Table(header, rows, "<<>>><", (0,), (), frozenset({0})),
    )


def _while_loops(plan: PlanData) -> Section:
    """Return the section on trip counts that the plan assumes, and why."""
    rows = tuple(
        (loop.source, f"{format_count(loop.trip_count)}x", _BASIS[loop.basis])
        for loop in plan.while_loops
    )
    return Section(
        "`while` loops that data may end: trips that are counted",
        table=Table(("line", "trips", "because"), rows, "<><", (0,)),
    )


_BASIS = {
    "stated": "`while_trips=` says so",
    "bound": "the program's bound; `while_trips=` states another count",
    "assumed": "assumed, the program has no bound; `while_trips=` states the count",
}


def _coverage(plan: PlanData) -> Section:
    coverage = plan.coverage
    facts = [
        (
            "have rules",
            f"{format_share(coverage.ops)} of ops, {format_share(coverage.flops)} of"
            f" FLOPs, {format_share(coverage.bytes)} of bytes",
        )
    ]
    if coverage.unknown:
        names = ", ".join(f"{name} ({count}x)" for name, count in coverage.unknown)
        facts.append(("replicated, no rule", names))
    return Section("coverage", facts=tuple(facts))


def _search(plan: PlanData) -> Section:
    search = plan.search
    # The bound covers this mesh and program only, not the other candidates compared.
    scope = ", of this program on this mesh" if plan.meshes or plan.variants else ""
    variables = "proved by the LP bound"
    if search.variables:
        variables = f"{format_count(search.variables)} Boolean variables"
    status, objective = (
        _STATUS.get(search.status, search.status),
        f"{format_seconds(search.objective_s)}, proved bound"
        f" {format_seconds(search.bound_s)}, gap {format_share(search.gap)}{scope}",
    )
    if plan.has_tasks:
        status = "feasible: stages are planned one after the other, without a bound"
        objective = format_seconds(search.objective_s)
    facts = [
        ("status", status),
        ("objective", objective),
        (
            "work",
            f"{format_seconds(search.seconds)}, level {search.level!r}, {variables}",
        ),
    ]
    if plan.cached:
        facts.append(("kept", f"searched once, read from {plan.cached}"))
    if search.nodes != (0, 0):
        before, after = search.nodes
        nodes = f"{format_count(before)}, {format_count(after)} after reduction"
        facts.append(("nodes", nodes))
    return Section("search", facts=tuple(facts))


_STATUS = {
    "optimal": "optimal: no plan in the search space is cheaper",
    "feasible": "feasible: a plan cheaper by the gap is not ruled out",
    "recipe": "recipe: the limit was too short for a search, this is the best recipe",
    "pinned": "pinned: nothing was left to choose",
}
