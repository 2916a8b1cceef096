"""The difference of two plans, and its displays."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from rhino_jax.errors import PlanFileError
from rhino_jax.explain.report.html import Displayed
from rhino_jax.explain.report.line import format_mesh
from rhino_jax.explain.report.section import Section, Table
from rhino_jax.explain.report.tables import STATE_PREFIX, fold, format_axes
from rhino_jax.explain.report.views.bars import Bar, Quantity, bars, peak_of, step_of
from rhino_jax.ir.spec import format_spec
from rhino_jax.plan.fingerprint import first_change, outline_of
from rhino_jax.plan.plan import Leaf, PlanData
from rhino_jax.plan.records import Predicted, Traffic, traffic_of
from rhino_jax.units import (
    format_bytes,
    format_count,
    format_ratio,
    format_seconds,
)
from rhino_jax.utils.keywords import brief


@dataclass(frozen=True, slots=True)
class SpecChange:
    """A value whose layout differs.

    Attributes:
      side: "input" or "output" of the program.
      path: tree path of the value.
      before, after: specs as text; empty if that plan has no such value.
      bytes_before, bytes_after: bytes of one device's shard.
      worth_s: how many seconds longer plan B's step is if this value has its layout of
        plan A and everything else is solved again; None if not requested.
    """

    side: str
    path: str
    before: str
    after: str
    bytes_before: int
    bytes_after: int
    worth_s: float | None = None


@dataclass(frozen=True, slots=True)
class TrafficChange:
    """Collectives of one kind over the same axes, in both plans."""

    kind: str
    axes: tuple[str, ...]
    before: Traffic
    after: Traffic


@dataclass(frozen=True, slots=True)
class PlanDiff(Displayed):
    """Differences between two plans; `print` it to read it. Pairs are (plan A, plan B).

    Attributes:
      programs: names of the programs.
      has_same_fingerprint: whether program and mesh are equal.
      change: description of the first op that differs; empty if unknown.
      meshes: (name, size) of their mesh axes.
      hardware: names of their targets.
      predicted: their predictions.
      specs: inputs and outputs whose specs differ, largest first.
      traffic: collectives by kind and axes, where they differ, slowest first.
      unchanged: number of inputs and outputs with equal specs.
      values: (number of values with different specs, number of values compared),
        intermediate values included; zeros if the programs differ.
      chosen: names of the program passes chosen for each plan, as micro-batches.
    """

    programs: tuple[str, str]
    has_same_fingerprint: bool
    change: str
    meshes: tuple[tuple[tuple[str, int], ...], tuple[tuple[str, int], ...]]
    hardware: tuple[str, str]
    predicted: tuple[Predicted, Predicted]
    specs: tuple[SpecChange, ...]
    traffic: tuple[TrafficChange, ...]
    unchanged: int
    values: tuple[int, int]
    chosen: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())

    @property
    def is_empty(self) -> bool:
        """Whether the plans are equal in all of these."""
        return (
            self.has_same_fingerprint
            and self.meshes[0] == self.meshes[1]
            and self.hardware[0] == self.hardware[1]
            and self.predicted[0] == self.predicted[1]
            and not self.specs
            and not self.traffic
            and not self.values[0]
            and self.chosen[0] == self.chosen[1]
        )

    def _sections(self, *, full: bool) -> tuple[Section, ...]:
        return _sections(self)


MAX_WORTH = 6
"""Maximum number of changed arrays, the largest, whose worth is evaluated: each costs a
brief search."""


def diff(a: PlanData, b: PlanData, *, worth: bool = True) -> PlanDiff:
    """Compare plan `a` with plan `b`: predictions, specs, collectives.

    Plans of other programs, meshes and hardware may be compared too; arguments and
    results are then matched by tree path.

    Args:
      a, b: plans, as `rhino.plan` or `rhino.load_plan` return them.
      worth: whether to evaluate what the changes of the largest arrays are worth, each
        by itself: the step of `b` with that array laid out as in `a`, less its step.
        Only if both plans are of one program, mesh and hardware, and `b` was planned in
        this process. Takes about a second for each.
    Returns:
      The differences; `print` it to read it. Bytes are per device, times in seconds
      per step, both as predicted.
    Raises:
      PlanFileError: one of them is not a plan.
    Example:
      >>> print(rhino.diff(rhino.load_plan("monday.json"), plan))  # doctest: +SKIP
    """
    for one in (a, b):
        if not hasattr(one, "mesh_axes"):
            raise PlanFileError(
                "`diff`: this is no plan.",
                where="the plan to compare with",
                numbers=f"got {brief(one)} ({type(one).__name__})",
                fix="give a Plan, as rhino.plan(…) and rhino.load_plan(…) return it.",
            )
    inputs, same_inputs = _spec_changes("input", a, b, a.inputs, b.inputs)
    outputs, same_outputs = _spec_changes("output", a, b, a.outputs, b.outputs)
    changes = sorted(
        inputs + outputs, key=lambda c: -max(c.bytes_before, c.bytes_after)
    )
    before, after = traffic_of(a.collectives), traffic_of(b.collectives)
    traffic = [
        TrafficChange(*line, before.get(line, Traffic()), after.get(line, Traffic()))
        for line in {**after, **before}
    ]
    traffic.sort(key=lambda c: -max(c.before.seconds, c.after.seconds))
    found = PlanDiff(
        programs=(a.program_name, b.program_name),
        has_same_fingerprint=a.fingerprint == b.fingerprint,
        change=""
        if a.fingerprint == b.fingerprint
        else first_change(outline_of(a), outline_of(b)),
        meshes=(tuple(a.mesh_axes), tuple(b.mesh_axes)),
        hardware=(a.hardware, b.hardware),
        predicted=(a.predicted, b.predicted),
        specs=tuple(changes),
        traffic=tuple(c for c in traffic if c.before != c.after),
        unchanged=same_inputs + same_outputs,
        values=_values_changed(a, b),
        chosen=(_chosen(a), _chosen(b)),
    )
    is_same = found.has_same_fingerprint and a.hardware == b.hardware
    if worth and is_same and b.origin is not None and b.is_one_mesh:
        found = _with_worth(found, a, b)
    return found


def _with_worth(found: PlanDiff, a: PlanData, b: PlanData) -> PlanDiff:
    from rhino_jax.explain.questions import worth_of

    inputs = {leaf.path: leaf.spec for leaf in a.inputs}
    asked = [c.path for c in found.specs if c.side == "input" and c.path in inputs]
    worth = worth_of(b, {path: inputs[path] for path in asked[:MAX_WORTH]})
    specs = tuple(
        replace(c, worth_s=worth.get(c.path)) if c.side == "input" else c
        for c in found.specs
    )
    return replace(found, specs=specs)


def _chosen(plan: PlanData) -> tuple[str, ...]:
    return tuple(t.name for t in plan.transforms if t.choice)


def _values_changed(a: PlanData, b: PlanData) -> tuple[int, int]:
    choices = [[t.choice for t in plan.transforms] for plan in (a, b)]
    if a.fingerprint != b.fingerprint or choices[0] != choices[1]:
        return 0, 0
    before, after = _specs_of(a), _specs_of(b)
    both = before.keys() & after.keys()
    return sum(before[v] != after[v] for v in both), len(both)


def _specs_of(plan: PlanData) -> dict[int, str]:
    """Return value id → spec as text, over all stages."""
    return {
        value: format_spec(spec, [name for name, _ in stage.mesh_axes])
        for stage in plan.stages
        for value, spec in stage.decisions.values.items()
    }


def _spec_changes(
    side: str, a: PlanData, b: PlanData, old: Iterable[Leaf], new: Iterable[Leaf]
) -> tuple[list[SpecChange], int]:
    names_a = [name for name, _ in a.mesh_axes]
    names_b = [name for name, _ in b.mesh_axes]
    before = {x.path: (format_spec(x.spec, names_a), x) for x in old}
    after = {x.path: (format_spec(x.spec, names_b), x) for x in new}
    changes, same = [], 0
    for path in [*before, *(p for p in after if p not in before)]:
        text_a, leaf_a = before.get(path, ("", None))
        text_b, leaf_b = after.get(path, ("", None))
        if text_a == text_b:
            same += 1
            continue
        bytes_a = leaf_a.bytes_per_device if leaf_a else 0
        bytes_b = leaf_b.bytes_per_device if leaf_b else 0
        changes.append(SpecChange(side, path, text_a, text_b, bytes_a, bytes_b))
    return changes, same


def _sections(diff: PlanDiff) -> tuple[Section, ...]:
    name_a, name_b = diff.programs
    title = f"from plan A to plan B of {name_a}"
    if name_a != name_b:
        title = f"from plan A of {name_a} to plan B of {name_b}"
    if diff.is_empty:
        return (Section(title, lines=("no difference.",)),)
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
    sections = [
        Section(title, facts=tuple(facts)),
        _numbers(diff),
        _spec_section(diff),
        _traffic(diff),
    ]
    return tuple(s for s in sections if s.table is None or s.table.rows)


def _numbers(diff: PlanDiff) -> Section:
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


def _spec_section(diff: PlanDiff) -> Section:
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


def _traffic(diff: PlanDiff) -> Section:
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
