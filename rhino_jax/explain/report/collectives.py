"""The collectives of a plan: by kind and axes, then by the user's line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rhino_jax.explain.report.folding import fold
from rhino_jax.explain.report.section import Section, Table
from rhino_jax.plan.diff import Traffic, traffic_of
from rhino_jax.plan.records import Collective
from rhino_jax.units import format_bytes, format_count, format_seconds


if TYPE_CHECKING:
    from rhino_jax.plan.plan import PlanData

TOP_COLLECTIVES = 12


def collective_sections(plan: PlanData, *, full: bool) -> tuple[Section, ...]:
    """Return the sections of totals by kind and axes, and by source line."""
    if not plan.collectives:
        none = "none: no device talks to another."
        if plan.has_tasks:
            none = "none within a stage; above is what stages send to each other."
        return (Section("collectives", lines=(none,)),)
    return (_totals(plan), _sources(plan, full=full))


def format_axes(axes: tuple[str, ...]) -> str:
    return " × ".join(axes) if axes else "-"


def _totals(plan: PlanData) -> Section:
    totals = traffic_of(plan.collectives)
    rows = tuple(
        (kind, format_axes(axes), *_numbers(t)) for (kind, axes), t in totals.items()
    )
    seconds = sum(t.seconds for t in totals.values())
    wire_bytes = sum(t.bytes for t in totals.values())
    return Section(
        f"collectives: {format_bytes(wire_bytes)} on the wire per device,"
        f" {format_seconds(seconds)} if nothing is hidden",
        table=Table(
            ("kind", "axes", "count", "bytes", "time"),
            rows,
            "<<>>>",
            (1,),
            tuple(t.seconds / seconds if seconds else 0.0 for t in totals.values()),
        ),
    )


def _sources(plan: PlanData, *, full: bool) -> Section:
    groups: dict[tuple[str, ...], list[Collective]] = {}
    for c in plan.collectives:
        key = (c.kind, format_axes(c.axes), c.source)
        # In the full table, only collectives equal in every column share a row.
        groups.setdefault((*key, c.reason, c.op) if full else key, []).append(c)
    entries = [(key, _sum(members), members) for key, members in groups.items()]
    entries.sort(key=lambda e: (-e[1].seconds, -e[1].bytes))
    shown = entries if full else entries[:TOP_COLLECTIVES]
    rows = []
    for (kind, axes, source, *_), total, members in entries:
        # The full table names the function; here the reason needs the width.
        line = source if full else source.partition(" (")[0]
        rows.append((kind, axes, *_numbers(total), line, _why(members)))
    rest = entries[len(shown) :]
    lines: tuple[str, ...] = ()
    if rest:
        rest_s = sum(total.seconds for _, total, _ in rest)
        lines = (f"and {format_count(len(rest))} more: {format_seconds(rest_s)}",)
    table = Table(
        ("kind", "axes", "count", "bytes", "time", "source", "why"),
        tuple(rows),
        "<<>>><<",
        (6, 5, 1),
        below=6,
    )
    return Section(
        "where they come from",
        table=table.rows_of(0, len(shown)),
        lines=lines,
        rest=table.rows_of(len(shown), len(rows)),
    )


def _why(members: Sequence[Collective]) -> str:
    """Return the most frequent reason, layers folded, and the count of others."""
    folds = fold((why, ()) for why in dict.fromkeys(c.reason or c.op for c in members))
    first = max(folds, key=lambda f: len(f.members))
    rest = len(folds) - 1
    return f"{first.label}; and {rest} more" if rest else first.label


def _numbers(total: Traffic) -> tuple[str, str, str]:
    return (
        format_count(total.count),
        format_bytes(total.bytes),
        format_seconds(total.seconds),
    )


def _sum(members: Sequence[Collective]) -> Traffic:
    return Traffic(
        sum(c.count for c in members),
        sum(c.bytes for c in members),
        sum(c.seconds for c in members),
    )
