"""The result of `plan.verify`: predictions compared with the compiled program."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rhino_jax.explain.report.html import Displayed
from rhino_jax.explain.report.line import format_mesh
from rhino_jax.explain.report.section import Section, Table
from rhino_jax.explain.report.tables import format_axes
from rhino_jax.explain.report.views.bars import (
    Bar,
    Quantity,
    bars,
    peak_of,
    step_of,
    wire_of,
)
from rhino_jax.plan.records import Collective, Predicted, traffic_of
from rhino_jax.units import (
    format_bytes,
    format_count,
    format_flops,
    format_ratio,
    format_seconds,
)
from rhino_jax.verify.hlo.records import OutOfMemory
from rhino_jax.verify.matching.matcher import Difference
from rhino_jax.verify.matching.times import TimeDifference
from rhino_jax.verify.stages import CompiledPlan
from rhino_jax.verify.verdict import Verdict


TOP_DIFFERENCES = 10
TOP_SOURCES = 3
SIDES = ("compiled", "predicted")
MIN_SHARE = 0.01
"""Share of the step below which the difference of a line's seconds is not shown."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Verification(Displayed, CompiledPlan):
    """A plan compared with its compiled program.

    Attributes:
      program_name: name of the planned function.
      mesh_axes: (name, size) of every mesh axis, major first.
      hardware: name of the target whose rates turn compiled work into seconds.
      planned_hardware: name of the plan's target. Where the two differ, seconds in
        `planned` and `differences` are of `hardware`, those in `predicted` are not.
      predicted: the plan's prediction.
      planned: the plan's collectives.
      differences: differences of planned and compiled collectives, most seconds first.
      time_differences: predicted and compiled seconds by source line and pass, those
        that differ most first; they add up to both steps. Empty for other hardware.
      memory_budget_bytes: memory budget of the plan, bytes per device.
      verdict: reasons why the plan does not hold, by what they concern.
    """

    program_name: str
    mesh_axes: tuple[tuple[str, int], ...]
    hardware: str
    planned_hardware: str
    predicted: Predicted
    planned: tuple[Collective, ...]
    differences: tuple[Difference, ...]
    time_differences: tuple[TimeDifference, ...]
    memory_budget_bytes: int
    verdict: Verdict

    @property
    def ok(self) -> bool:
        """Whether the compiled program does what the plan says.

        It is so if the program fits and `traffic_ok`, `peak_ok` and, where step times
        are judged, `time_ok` hold.
        """
        return not self.problems

    @property
    def problems(self) -> tuple[str, ...]:
        """Reasons why the plan does not hold, as sentences; empty where it does."""
        return (*self.verdict.time, *self.verdict.peak, *self.verdict.traffic)

    @property
    def time_ok(self) -> bool | None:
        """Return whether predicted and compiled step are within 1.6 times, either way.

        A difference of 20 µs is allowed: a few launches. None where step times are not
        judged: for other hardware than was planned for, and on emulated devices, whose
        time no compiler tells.
        """
        return None if self.verdict.no_time else not self.verdict.time

    @property
    def peak_ok(self) -> bool:
        """Whether the peak memory is as predicted, and within the plan's budget.

        Predicted and compiled differ by at most 20 % of the larger, or by 1 % of the
        budget.
        """
        return not self.verdict.peak

    @property
    def traffic_ok(self) -> bool:
        """Whether the program moves what the plan says, and its numbers are right.

        All of these hold:

        - It fits: of another program the compiler tells nothing.
        - No reduction over devices adds the same parts several times: wrong numbers.
        - No value is rematerialised involuntarily.
        - Bytes on the wire that differ for no harmless reason, more or fewer, are at
          most 10 % of the planned, or take at most 5 % of the compiled step.
        - No collective of a kind and axes that the plan does not have takes more than
          5 % of the compiled step.

        Harmless are: the same bytes in fewer or more runs or in another order; fewer
        runs (hoisted out of a loop); more chunks of a windowed einsum that overlap with
        its matmul; traffic inside a user's `shard_map`; and on CPU an all-reduce for a
        reduce-scatter, which XLA:CPU does not have.
        """
        return self.compiled is not None and not self.verdict.traffic

    @property
    def planned_wire_bytes(self) -> int:
        """Bytes that one device puts on the wire per step, as planned."""
        return sum(c.bytes for c in self.planned)

    def _line(self) -> str:
        """Return one line with program, mesh, platform, and whether the plan holds."""
        head = (
            f"Verification({self.program_name} on {format_mesh(self.mesh_axes)},"
            f" compiled for {self.hardware}: {self._headline()}"
        )
        if self.compiled is None:
            return f"{head})"
        compiled, predicted = self.compiled, self.predicted
        a, b = map(format_seconds, (predicted.step_time_s, compiled.step_time_s))
        step = f"{a} of {b}" if self.hardware == self.planned_hardware else b
        return (
            f"{head}; {step}/step, wire {format_bytes(self.planned_wire_bytes)} of"
            f" {format_bytes(self.wire_bytes)}, peak"
            f" {format_bytes(predicted.peak_bytes)} of"
            f" {format_bytes(compiled.peak_bytes)})"
        )

    def _headline(self) -> str:
        """Return the verdict, and each prediction as a share of what was compiled."""
        if self.compiled is None:
            return "not ok, out of memory"
        compiled, predicted = self.compiled, self.predicted
        said = [
            f"{a / b:.2f} of {name}"
            for name, a, b in (
                ("compiled time", predicted.step_time_s, compiled.step_time_s),
                ("peak", predicted.peak_bytes, compiled.peak_bytes),
                ("wire", self.planned_wire_bytes, self.wire_bytes),
            )
            if b and not (name == "compiled time" and self.verdict.no_time)
        ]
        time = ", time not judged" if self.verdict.no_time else ""
        return f"{'ok' if self.ok else 'not ok'}, predicted {', '.join(said)}{time}"

    def _sections(self, *, full: bool) -> tuple[Section, ...]:
        sections = [
            _head(self),
            Section("why it is not ok", lines=self.problems),
            _numbers(self),
            _times(self, full=full),
            _chunks(self),
            _traffic(self),
            *_differences(self.differences, full=full),
            remat_section(self.rematerialised, full=full),
            out_of_memory_section(self.out_of_memory),
            Section("notes", lines=self.notes),
        ]
        return tuple(s for s in sections if not s.is_empty)

    def __str__(self) -> str:
        return self._line()


def _head(found: Verification) -> Section:
    facts = [
        ("mesh", format_mesh(found.mesh_axes)),
        ("planned for", found.planned_hardware),
        (
            "compiled for",
            f"{found.hardware} ({found.platform}), in {format_seconds(found.seconds)}",
        ),
    ]
    if found.verdict.no_time:
        facts.append(("time", f"not judged: {found.verdict.no_time}"))
    title = f"verification of {found.program_name}: {found._headline()}"
    return Section(title, facts=tuple(facts))


def _numbers(found: Verification) -> Section:
    """Return predicted and compiled quantities; times for equal hardware only."""
    compiled, predicted = found.compiled, found.predicted
    if compiled is None:
        return Section("")
    wire = quantity_row(
        "wire bytes", found.wire_bytes, found.planned_wire_bytes, format_bytes
    )
    rows = [wire, *work_rows(compiled, predicted)]
    times = time_rows(compiled, predicted)
    if found.hardware == found.planned_hardware:
        rows = [*times, *rows]
    else:
        rows += [(name, value, "-", "-") for name, value, _, _ in times]
    header = ("per device", *SIDES, "predicted to compiled")
    return Section(
        "compiled and predicted",
        table=Table(header, tuple(rows), "<>>>"),
        drawing=_drawn(found),
    )


def _times(found: Verification, *, full: bool) -> Section:
    """Return the section of lines whose seconds differ, where the step's do."""
    if not found.verdict.time and not full:
        return Section("")
    min_s = MIN_SHARE * max(
        x.step_time_s for x in (found.predicted, found.compiled) if x is not None
    )
    differing = [d for d in found.time_differences if abs(d.seconds) >= min_s]
    shown = differing if full else differing[:TOP_DIFFERENCES]
    rows = tuple(
        (
            d.source or "no line",
            f"{d.op}, backward" if d.is_backward else d.op,
            format_seconds(d.compiled_s),
            format_seconds(d.predicted_s),
            format_ratio(d.predicted_s / d.compiled_s) if d.compiled_s else "-",
            "; ".join((d.cause, *(f"longest: {name}" for name in d.kernels[:1]))),
        )
        for d in shown
    )
    rest = len(differing) - len(shown)
    header = ("line", "op", *SIDES, "predicted to compiled", "what")
    return Section(
        "lines whose time is most wrong, worst first",
        table=Table(header, rows, "<<>>><", (0, 1), below=5),
        lines=(f"and {format_count(rest)} more",) if rest else (),
    )


def _drawn(found: Verification) -> str:
    """Draw memory and traffic of both sides; the step for equal hardware only."""
    sides = (found.compiled, found.predicted)
    is_same = found.hardware == found.planned_hardware
    quantities = [
        *([step_of(sides)] if is_same else []),
        peak_of(sides),
        *wire_of((found.collectives, found.planned)),
    ]
    return bars(quantities, SIDES)


def time_rows(a: Predicted, b: Predicted) -> list[tuple[str, str, str, str]]:
    """Return rows with the times of two programs side by side."""
    return [
        quantity_row("step time", a.step_time_s, b.step_time_s, format_seconds),
        quantity_row("compute", a.compute_s, b.compute_s, format_seconds),
        quantity_row(
            "communication", a.communication_s, b.communication_s, format_seconds
        ),
    ]


def work_rows(a: Predicted, b: Predicted) -> list[tuple[str, str, str, str]]:
    """Return rows with memory and arithmetic of two programs side by side."""
    return [
        quantity_row("peak memory", a.peak_bytes, b.peak_bytes, format_bytes),
        quantity_row("FLOPs", a.flops_per_device, b.flops_per_device, format_flops),
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


def _traffic(found: Verification) -> Section:
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


PASSES = ("forward", "whole batch", "backward", "update")
"""Passes in their order in a step. The second exists if micro-batches are coupled."""


def _chunks(found: Verification) -> Section:
    """Return the section that compares every stage chunk as planned and as compiled.

    For an SPMD pipeline, which all of its devices run, it shows memory by stage only.
    """
    if found.compiled is None:
        return Section("")
    if not found.stages:
        return _peaks(found)
    of_chunk = found.between or ((0.0, 0.0),) * len(found.stages)
    every = [
        [
            (cost.forward_s, between_s, cost.whole_backward_s, cost.update_s)
            for cost, between_s in zip(pair, seconds, strict=True)
        ]
        for pair, seconds in zip(found.stages, of_chunk, strict=True)
    ]
    there = (True, bool(found.between), True, True)
    names = tuple(itertools.compress(PASSES, there))
    rows, drawn = [], []
    for i, (pair, all_passes) in enumerate(zip(found.stages, every, strict=True)):
        passes = [tuple(itertools.compress(each, there)) for each in all_passes]
        cells = [
            " → ".join(map(format_seconds, each)) for each in zip(*passes, strict=True)
        ]
        working = [cost.working_bytes for cost in pair]
        rows.append((str(i), *cells, " → ".join(map(format_bytes, working))))
        drawn.append(
            Quantity(
                f"chunk {i}",
                "seconds",
                tuple(
                    Bar(tuple(zip(each, names, strict=True)), format_seconds(sum(each)))
                    for each in reversed(passes)
                ),
            )
        )
    # Compiled seconds of different hardware do not compare with planned ones.
    is_same = found.hardware == found.planned_hardware
    return Section(
        "chunks of stages: passes of one micro-batch, update"
        f"{' and whole batch' if found.between else ''} once a step;"
        " planned → compiled",
        table=Table(
            ("chunk", *names, "tasks take up to"),
            tuple(rows),
            ">" * (2 + len(names)),
        ),
        drawing=bars(drawn, SIDES, parts=names) if is_same else "",
    )


def _peaks(found: Verification) -> Section:
    planned = format_bytes(found.predicted.peak_bytes)
    rows = tuple(
        (str(i), f"{planned} → {format_bytes(peak)}")
        for i, peak in enumerate(found.stage_peak_bytes)
    )
    table = Table(("stage", "peak"), rows, ">>")
    return Section("stages: memory of one device, planned → compiled", table=table)
