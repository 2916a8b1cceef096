"""A step's seconds by the user's source lines, and the devices' utilisation (MFU)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rhino_jax.explain.report.section import Section, Table
from rhino_jax.units import format_flops, format_seconds, format_share


if TYPE_CHECKING:
    from rhino_jax.plan.plan import PlanData
    from rhino_jax.plan.records import LineTime

TOP_LINES = 12


def utilisation(plan: PlanData) -> tuple[tuple[str, str], ...]:
    """Return the fact on model FLOPs utilisation (MFU); empty without FLOPs."""
    if not plan.model_flops.flops:
        return ()
    return (
        (
            "MFU",
            f"{format_share(plan.mfu)}: {format_flops(plan.model_flops.flops)} of the"
            " model's products, without what is recomputed, over peak × devices × step",
        ),
    )


def by_line(plan: PlanData, *, full: bool) -> Section:
    """Return the section on seconds by source line, forward plus backward."""
    whole_s = sum(line.seconds for line in plan.line_times)
    if not whole_s:
        return Section("")
    shown = plan.line_times if full else plan.line_times[:TOP_LINES]
    rest = plan.line_times[len(shown) :]
    rows = tuple(
        (
            _line(line),
            format_seconds(line.seconds),
            format_share(line.seconds / whole_s),
            line.bound,
            format_flops(line.flops) if line.flops else "",
        )
        for line in plan.line_times
    )
    bounds: dict[str, float] = {}
    for line in plan.line_times:
        for name, seconds in line.parts:
            bounds[name] = bounds.get(name, 0.0) + seconds
    parts = ", ".join(
        f"{name} {format_share(seconds / whole_s)}"
        for name, seconds in sorted(bounds.items(), key=lambda b: -b[1])
        if seconds
    )
    lines = [f"bounded by {parts}"]
    if rest:
        rest_s = sum(line.seconds for line in rest)
        lines = [f"and {len(rest)} more: {format_seconds(rest_s)}", *lines]
    mean = ", the mean over devices" if plan.has_tasks else ""
    table = Table(
        ("line", "time", "share", "bound by", "per device"),
        rows,
        "<>><>",
        (0,),
        tuple(line.seconds / whole_s for line in plan.line_times),
    )
    return Section(
        f"where the step's {format_seconds(whole_s)} go, forward and backward{mean}",
        table=table.rows_of(0, len(shown)),
        lines=tuple(lines),
        rest=table.rows_of(len(shown), len(rows)),
    )


def _line(line: LineTime) -> str:
    """Return the source line, or for time without one its cause."""
    if line.source:
        return line.source if line.source != "?" else "added by passes"
    return {
        "other stages": "waiting for other stages",
        "communication": "moving arguments and results",
    }.get(line.bound, "copies between layouts")
