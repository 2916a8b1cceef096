"""The result of `plan.verify`: predictions compared with the compiled program.

Report of a verification: predicted compared with compiled; line, text and HTML.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rhino_jax.explain.report.html import sections_to_html
from rhino_jax.explain.report.line import format_mesh
from rhino_jax.explain.report.section import Section, Table
from rhino_jax.explain.report.stages import compiled_stages_section
from rhino_jax.explain.report.tables import format_axes
from rhino_jax.explain.report.text import sections_to_text
from rhino_jax.explain.report.views.bars import bars, peak_of, step_of, wire_of
from rhino_jax.explain.results.dress import dressed
from rhino_jax.plan.diff import traffic_of
from rhino_jax.units import (
    format_bytes,
    format_count,
    format_flops,
    format_ratio,
    format_seconds,
)
from rhino_jax.verify import verification as data


if TYPE_CHECKING:
    from rhino_jax.plan.records import Predicted
    from rhino_jax.verify.hlo.records import OutOfMemory
    from rhino_jax.verify.matching.matcher import Difference
    from rhino_jax.verify.verification import VerificationData


TOP_DIFFERENCES = 10
TOP_SOURCES = 3


def verification_line(found: VerificationData) -> str:
    """Return one line with program, mesh, platform, and whether the plan holds."""
    head = (
        f"Verification({found.program_name} on {format_mesh(found.mesh_axes)},"
        f" compiled for {found.hardware}: "
    )
    if found.compiled is None:
        return f"{head}out of memory)"
    compiled, predicted = found.compiled, found.predicted
    step = f"{format_seconds(compiled.step_time_s)}/step"
    if found.hardware == found.planned_hardware:
        step += f", predicted {format_seconds(predicted.step_time_s)}"
    return (
        f"{head}{step}; wire {format_bytes(found.wire_bytes)}, predicted"
        f" {format_bytes(found.planned_wire_bytes)}; peak"
        f" {format_bytes(compiled.peak_bytes)}, predicted"
        f" {format_bytes(predicted.peak_bytes)}; {'ok' if found.ok else 'not ok'})"
    )


def verification_to_text(found: VerificationData, *, full: bool = False) -> str:
    """Return the whole report of a verification as text.

    Args:
      found: the verification.
      full: show every difference and collective.
    """
    return sections_to_text(tell_verification(found, full=full))


def verification_to_html(found: VerificationData) -> str:
    """Return the whole report of a verification as self-contained HTML."""
    return sections_to_html(tell_verification(found), line=verification_line(found))


def tell_verification(
    found: VerificationData, *, full: bool = False
) -> tuple[Section, ...]:
    """Return all sections of a verification's report."""
    sections = [
        _head(found),
        Section("why it is not ok", lines=found.problems),
        _numbers(found),
        compiled_stages_section(found),
        _traffic(found),
        *_differences(found.differences, full=full),
        remat_section(found.rematerialised, full=full),
        out_of_memory_section(found.out_of_memory),
        Section("notes", lines=found.notes),
    ]
    return tuple(
        s
        for s in sections
        if s.facts or s.lines or (s.table is not None and s.table.rows)
    )


def _head(found: VerificationData) -> Section:
    verdict = "ok: the compiled program does what the plan says"
    if not found.ok:
        verdict = "not ok"
    return Section(
        f"verification of {found.program_name}",
        facts=(
            ("mesh", format_mesh(found.mesh_axes)),
            ("planned for", found.planned_hardware),
            (
                "compiled for",
                f"{found.hardware} ({found.platform}), in"
                f" {format_seconds(found.seconds)}",
            ),
            ("verdict", verdict),
        ),
    )


def _numbers(found: VerificationData) -> Section:
    """Return predicted and compiled quantities; times for equal hardware only."""
    compiled, predicted = found.compiled, found.predicted
    if compiled is None:
        return Section("")
    rows = [
        quantity_row(
            "wire bytes", found.planned_wire_bytes, found.wire_bytes, format_bytes
        ),
        quantity_row(
            "peak memory", predicted.peak_bytes, compiled.peak_bytes, format_bytes
        ),
        quantity_row(
            "FLOPs", predicted.flops_per_device, compiled.flops_per_device, format_flops
        ),
    ]
    times = time_rows(predicted, compiled)
    if found.hardware == found.planned_hardware:
        rows = [*times, *rows]
    else:
        rows += [(name, "-", value, "-") for name, _, value, _ in times]
    header = ("per device", "predicted", "compiled", "compiled to predicted")
    return Section(
        "predicted and compiled",
        table=Table(header, tuple(rows), "<>>>"),
        drawing=_drawn(found),
    )


def _drawn(found: VerificationData) -> str:
    """Draw memory and traffic of both sides; the step for equal hardware only."""
    sides = (found.predicted, found.compiled)
    is_same = found.hardware == found.planned_hardware
    quantities = [
        *([step_of(sides)] if is_same else []),
        peak_of(sides),
        *wire_of((found.planned, found.collectives)),
    ]
    return bars(quantities, ("predicted", "compiled"))


def time_rows(a: Predicted, b: Predicted) -> list[tuple[str, str, str, str]]:
    """Return rows with the times of two programs side by side."""
    return [
        quantity_row("step time", a.step_time_s, b.step_time_s, format_seconds),
        quantity_row("compute", a.compute_s, b.compute_s, format_seconds),
        quantity_row(
            "communication", a.communication_s, b.communication_s, format_seconds
        ),
    ]


def quantity_row(
    name: str, a: float, b: float, form: Callable[[float], str]
) -> tuple[str, str, str, str]:
    """Return a row: a quantity of two programs, and the second over the first.

    Args:
      name: name of the quantity.
      a, b: the quantity of the first and second program.
      form: formats it.
    """
    ratio = "=" if a == b else format_ratio(b / a) if a else "-"
    return name, form(a), form(b), ratio


def _traffic(found: VerificationData) -> Section:
    """Return the section of collectives by kind and mesh axes, planned and compiled."""
    planned, made = traffic_of(found.planned), traffic_of(found.collectives)
    if found.compiled is None or not (planned or made):
        return Section("")
    keys = sorted(
        {*planned, *made},
        key=lambda k: -max(t[k].seconds for t in (planned, made) if k in t),
    )
    rows = []
    for kind, axes in keys:
        sides = [t.get((kind, axes)) for t in (planned, made)]
        counts = [format_count(t.count) if t else "-" for t in sides]
        sizes = [format_bytes(t.bytes) if t else "-" for t in sides]
        times = [format_seconds(t.seconds) if t else "-" for t in sides]
        rows.append(
            (
                kind,
                format_axes(axes),
                " → ".join(counts),
                " → ".join(sizes),
                " → ".join(times),
            )
        )
    header = ("kind", "axes", "count", "bytes", "time")
    table = Table(header, tuple(rows), "<<>>>", (1,))
    return Section("collectives, planned → compiled", table=table)


def _differences(
    differences: Sequence[Difference], *, full: bool
) -> tuple[Section, ...]:
    if not differences:
        return (Section("differences", lines=("none: every collective is planned.",)),)
    shown = differences if full else differences[:TOP_DIFFERENCES]
    rows, marked = [], set()
    for i, d in enumerate(shown):
        made = ", ".join(f"{k} {format_axes(a)}" for k, a in d.became)
        what = f"{d.kind} {format_axes(d.axes)}"
        lines = [s if full else s.partition(" (")[0] for s in d.sources]
        if not full and len(lines) > TOP_SOURCES:
            lines[TOP_SOURCES:] = [f"+{len(lines) - TOP_SOURCES}"]
        if not d.is_harmless:
            marked.add(i)
        rows.append(
            (
                f"{what} → {made}" if made else what,
                f"{format_count(d.predicted.count)} → {format_count(d.compiled.count)}",
                _signed(format_bytes, d.bytes),
                _signed(format_seconds, d.seconds),
                d.label,
                ", ".join(lines),
            )
        )
    rest = len(differences) - len(shown)
    causes = dict.fromkeys(d.cause for d in shown)
    lines = [f"- {cause}." for cause in causes]
    if rest:
        lines.append(f"and {format_count(rest)} more")
    header = ("collective", "count", "bytes", "time", "what", "source")
    table = Table(header, tuple(rows), "<>>><<", (5, 0), (), frozenset(marked))
    title = "differences (marked: those that are not harmless)" if marked else None
    return (
        Section(title or "differences, all harmless", table=table, lines=tuple(lines)),
    )


def _signed(form: Callable[[float], str], value: float) -> str:
    return f"+{form(value)}" if value > 0 else form(value) if value else "="


def remat_section(lines: Sequence[str], *, full: bool = False) -> Section:
    """Return the compiler's warnings on involuntary full rematerialization."""
    shown = tuple(lines if full else lines[:TOP_DIFFERENCES])
    if len(lines) > len(shown):
        shown += (f"and {format_count(len(lines) - len(shown))} more",)
    return Section(
        f"rematerialised involuntarily: {format_count(len(lines))}", lines=shown
    )


def out_of_memory_section(found: OutOfMemory | None) -> Section:
    """Return the compiler's out-of-memory message; empty if the program fits."""
    if found is None:
        return Section("")
    facts = [
        (name, format_bytes(value))
        for name, value in (
            ("needed", found.needed_bytes),
            ("available", found.available_bytes),
        )
        if value is not None
    ]
    return Section(
        "out of memory",
        facts=tuple(facts),
        lines=tuple(found.message.splitlines()[:6]),
    )


class Verification(data.VerificationData):
    """Predictions of a plan compared with the compiled program.

    Its attributes are those of `rhino_jax.verify.verification.VerificationData`.
    """

    __slots__ = ()

    @classmethod
    def of(cls, found: data.VerificationData) -> Verification:
        """Return a verification's data as this class."""
        return dressed(cls, found)

    def table(self, *, full: bool = False) -> str:
        """Return predicted and compiled quantities as text at most 100 columns wide.

        Args:
          full: show every difference and collective.
        """
        return verification_to_text(self, full=full)

    def __repr__(self) -> str:
        return verification_line(self)

    def _repr_html_(self) -> str:
        return verification_to_html(self)
