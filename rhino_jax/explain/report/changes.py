"""The difference of two plans, as text and HTML."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rhino_jax.explain.report.html import sections_to_html
from rhino_jax.explain.report.line import format_mesh
from rhino_jax.explain.report.section import Section, Table
from rhino_jax.explain.report.tables import STATE_PREFIX, fold, format_axes
from rhino_jax.explain.report.text import sections_to_text
from rhino_jax.explain.report.views.bars import Bar, Quantity, bars, peak_of, step_of
from rhino_jax.units import (
    format_bytes,
    format_count,
    format_ratio,
    format_seconds,
)


if TYPE_CHECKING:
    from collections.abc import Sequence

    from rhino_jax.plan.diff import PlanDiffData, SpecChange


def diff_to_text(diff: PlanDiffData) -> str:
    """Return the difference of two plans as text, one section per aspect."""
    return sections_to_text(_tell(diff))


def diff_to_html(diff: PlanDiffData) -> str:
    """Return the difference of two plans as self-contained HTML."""
    return sections_to_html(_tell(diff))


def _tell(diff: PlanDiffData) -> tuple[Section, ...]:
    name_a, name_b = diff.programs
    title = f"from plan A to plan B of {name_a}"
    if name_a != name_b:
        title = f"from plan A of {name_a} to plan B of {name_b}"
    if diff.is_empty:
        return (Section(title, lines=("no difference.",)),)
    sections = [
        Section(title, facts=_facts(diff)),
        _numbers(diff),
        _specs(diff),
        _traffic(diff),
    ]
    return tuple(s for s in sections if s.table is None or s.table.rows)


def _facts(diff: PlanDiffData) -> tuple[tuple[str, str], ...]:
    facts = []
    if diff.meshes[0] == diff.meshes[1] and not diff.has_same_fingerprint:
        # On different meshes, fingerprints of one program differ, too.
        why = diff.change or "fingerprints differ"
        facts.append(("program", f"not the same ({why})"))
    meshes = [format_mesh(m) for m in diff.meshes]
    for name, (a, b) in (("mesh", meshes), ("hardware", diff.hardware)):
        facts.append((name, a if a == b else f"{a}  →  {b}"))
    if diff.chosen[0] != diff.chosen[1]:
        before, after = (", ".join(names) or "none" for names in diff.chosen)
        facts.append(("transforms", f"{before}  →  {after}"))
    changed, count = diff.values
    if changed:
        share = f"{format_count(changed)} of {format_count(count)}"
        facts.append(("values", f"{share}, inner ones too, with other specs"))
    return tuple(facts)


def _numbers(diff: PlanDiffData) -> Section:
    a, b = diff.predicted
    rows = [
        ("step time", *_pair(a.step_time_s, b.step_time_s)),
        ("compute", *_pair(a.compute_s, b.compute_s)),
        ("communication", *_pair(a.communication_s, b.communication_s)),
        (
            "peak memory",
            format_bytes(a.peak_bytes),
            format_bytes(b.peak_bytes),
            _ratio(a.peak_bytes, b.peak_bytes),
        ),
    ]
    header = ("per device", "A", "B", "B to A")
    return Section(
        "predicted",
        table=Table(header, tuple(rows), "<>>>"),
        drawing=bars([step_of((a, b)), peak_of((a, b))], ("plan A", "plan B")),
    )


def _pair(a_s: float, b_s: float) -> tuple[str, str, str]:
    return format_seconds(a_s), format_seconds(b_s), _ratio(a_s, b_s)


def _ratio(a: float, b: float) -> str:
    if a == b:
        return "="
    return format_ratio(b / a) if a else "-"


def _specs(diff: PlanDiffData) -> Section:
    """Return the section on changed specs: repeated layers folded, state shown once."""
    inputs = {(c.path, c.before, c.after) for c in diff.specs if c.side == "input"}
    shown = [
        c
        for c in diff.specs
        if c.side == "input"
        or (c.path.removeprefix(STATE_PREFIX), c.before, c.after) not in inputs
    ]
    rows, told = [], []
    for item in fold((c.path, (c.side, c.before, c.after)) for c in shown):
        members = [shown[i] for i in item.members]
        told.append((item.label, members))
        first, count = members[0], len(members)
        before = format_bytes(sum(c.bytes_before for c in members))
        after = format_bytes(sum(c.bytes_after for c in members))
        rows.append(
            (
                item.label,
                f"{count}x" if count > 1 else "",
                first.before or "absent",
                first.after or "absent",
                f"{before} → {after}",
                _worth(members),
            )
        )
    has_worth = any(row[-1] for row in rows)
    header = ("path", "", "A", "B", "bytes per device", "worth")
    width = len(header) if has_worth else len(header) - 1
    cells = tuple(row[:width] for row in rows)
    state = len(diff.specs) - len(shown)
    lines = (f"{format_count(state)} of state, as the inputs they replace",)
    drawn = [_bar_of(label, shown) for label, shown in told if _asked(shown)]
    return Section(
        f"specs: {format_count(len(diff.specs))} changed,"
        f" {format_count(diff.unchanged)} as before",
        table=Table(header[:width], cells, "<<<<>>"[:width], (0, 2, 3)),
        lines=(*(lines if state else ()), *(WORTH if has_worth else ())),
        drawing=bars(drawn, ("gained by B's layout", "lost by it")),
    )


WORTH = ("worth: how much longer B's step is with that array as in A, all else free",)


def _asked(members: Sequence[SpecChange]) -> list[float]:
    """Return the worths of repeated layers in seconds, where evaluated."""
    return [c.worth_s for c in members if c.worth_s is not None]


def _worth(members: Sequence[SpecChange]) -> str:
    """Format the worth of the first of repeated layers that was evaluated."""
    found = _asked(members)
    if not found:
        return ""
    sign = "−" if found[0] < 0 else ""
    each = " each" if len(members) > 1 else ""
    return f"{sign}{format_seconds(abs(found[0]))}{each}"


def _bar_of(label: str, members: Sequence[SpecChange]) -> Quantity:
    """Return a layout's worth as a bar, on the side of a gain or of a loss."""
    worth_s, change = _asked(members)[0], f"{members[0].before} → {members[0].after}"
    bar = Bar(((abs(worth_s), change),), _worth(members))
    return Quantity(label, "worth", (bar,), first=0 if worth_s >= 0 else 1)


def _traffic(diff: PlanDiffData) -> Section:
    rows = tuple(
        (
            c.kind,
            format_axes(c.axes),
            f"{format_count(c.before.count)} → {format_count(c.after.count)}",
            f"{format_bytes(c.before.bytes)} → {format_bytes(c.after.bytes)}",
            f"{format_seconds(c.before.seconds)} → {format_seconds(c.after.seconds)}",
        )
        for c in diff.traffic
    )
    header = ("kind", "axes", "count", "bytes", "time")
    return Section("collectives", table=Table(header, rows, "<<>>>", (1,)))
