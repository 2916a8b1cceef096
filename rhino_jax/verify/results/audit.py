"""The result of `rhino.audit`: a hand-sharded program, compiled."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Generic

from rhino_jax.explain.report.html import Displayed
from rhino_jax.explain.report.line import format_mesh
from rhino_jax.explain.report.section import Section, Table
from rhino_jax.explain.report.tables import format_axes, value_sections
from rhino_jax.explain.report.views.bars import bars, peak_of, step_of, wire_of
from rhino_jax.export.code import patch_of
from rhino_jax.plan.plan import AnyPlan
from rhino_jax.units import (
    format_bytes,
    format_count,
    format_ratio,
    format_seconds,
    format_share,
)
from rhino_jax.verify.culprits import SourceCost
from rhino_jax.verify.hlo.records import CompiledStep
from rhino_jax.verify.results.verification import (
    Verification,
    out_of_memory_section,
    quantity_row,
    remat_section,
    time_rows,
    work_rows,
)


TOP_COSTS = 8


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Audit(Displayed, CompiledStep, Generic[AnyPlan]):
    """Cost and memory use of a hand-sharded program, next to rhino's plan.

    The unchanged program's collectives come with those first that take most seconds.

    Attributes:
      program_name: name of the audited function.
      mesh_axes: (name, size) of every mesh axis, major first.
      hardware: name of the target whose rates turn compiled work into seconds.
      memory_budget_bytes: memory budget, bytes per device.
      costs: communication cost of each source line, most seconds first.
      plan: rhino's plan of the same function; None where there is none.
      rhino: verification of that plan, compiled for the same mesh; None without a plan.
    """

    program_name: str
    mesh_axes: tuple[tuple[str, int], ...]
    hardware: str
    memory_budget_bytes: int
    costs: tuple[SourceCost, ...]
    plan: AnyPlan | None
    rhino: Verification | None

    @property
    def gain(self) -> float | None:
        """Compiled step time of the unchanged program ÷ that of rhino's plan.

        Above 1, rhino's is faster; infinite where only rhino's fits, 0 where only the
        user's does; None where neither does or there is no plan.
        """
        ours = None if self.rhino is None else self.rhino.compiled
        if self.compiled is None:
            return None if ours is None else float("inf")
        if ours is None:
            return None if self.rhino is None else 0.0
        if not ours.step_time_s:
            return 1.0 if not self.compiled.step_time_s else float("inf")
        return self.compiled.step_time_s / ours.step_time_s

    def patch(self) -> str:
        """Return rhino's plan as a diff of your files, for `patch -p1`.

        It adds constraints at your lines, and changes your own where the plan has
        another layout. Constraints on names alone (`h = with_sharding_constraint(h,
        …)`) stay as they are. Empty if there is no plan.
        """
        return "" if self.plan is None else patch_of(self.plan)

    def _line(self) -> str:
        """Return one line with program, mesh, step, traffic, memory and gain."""
        head = (
            f"Audit({self.program_name} on {format_mesh(self.mesh_axes)},"
            f" compiled for {self.hardware}: "
        )
        compiled = self.compiled
        if compiled is None:
            return f"{head}out of memory; {_verdict(self)})"
        return (
            f"{head}{format_seconds(compiled.step_time_s)}/step, wire"
            f" {format_bytes(self.wire_bytes)}, peak"
            f" {format_bytes(compiled.peak_bytes)}; {_verdict(self)})"
        )

    def _sections(self, *, full: bool) -> tuple[Section, ...]:
        sections = [
            _head(self),
            out_of_memory_section(self.out_of_memory),
            _beside(self),
            *_costs(self, full=full),
            remat_section(self.rematerialised, full=full),
            _held(self),
            _inputs(self, full=full),
            Section("notes", lines=self.notes),
        ]
        return tuple(s for s in sections if not s.is_empty)

    def __str__(self) -> str:
        return self._line()


AnyAudit = Audit[Any]


def _verdict(found: AnyAudit) -> str:
    gain = found.gain
    if gain is None:
        return "rhino has no plan" if found.plan is None else "rhino's does not fit"
    if math.isinf(gain):
        return "rhino's plan fits"
    if not gain:
        return "rhino's does not fit"
    if gain < 1:
        return f"no gain: rhino's plan takes {format_ratio(1 / gain)} the time"
    return f"gain with rhino {format_ratio(gain)}"


def _head(found: AnyAudit) -> Section:
    facts = [
        ("mesh", format_mesh(found.mesh_axes)),
        (
            "compiled for",
            f"{found.hardware} ({found.platform}), in {format_seconds(found.seconds)}",
        ),
        ("verdict", _verdict(found)),
    ]
    if found.compiled is not None:
        peak, budget = found.compiled.peak_bytes, found.memory_budget_bytes
        share = format_share(peak / max(1, budget))
        over = ": over the budget" if peak > budget else ""
        facts.append(
            (
                "peak memory",
                f"{format_bytes(peak)} of {format_bytes(budget)} ({share}){over}",
            )
        )
    return Section(f"audit of {found.program_name}", facts=tuple(facts))


def _beside(found: AnyAudit) -> Section:
    """Return the section that compares program and rhino's plan, both compiled."""
    ours = None if found.rhino is None else found.rhino.compiled
    if found.compiled is None or ours is None or found.rhino is None:
        return Section("")
    theirs = found.compiled
    rows = (
        *time_rows(theirs, ours),
        quantity_row(
            "wire bytes", found.wire_bytes, found.rhino.wire_bytes, format_bytes
        ),
        *work_rows(theirs, ours),
    )
    header = ("per device", "as it is", "rhino's plan", "rhino's to it")
    quantities = [
        step_of((theirs, ours)),
        peak_of((theirs, ours)),
        *wire_of((found.collectives, found.rhino.collectives)),
    ]
    return Section(
        "both compiled",
        table=Table(header, rows, "<>>>"),
        drawing=bars(quantities, ("as it is", "rhino's plan")),
    )


def _costs(found: AnyAudit, *, full: bool) -> tuple[Section, ...]:
    if found.compiled is None:
        return ()
    if not found.costs:
        return (Section("communication", lines=("none: no device talks to another.",)),)
    whole_s = sum(c.traffic.seconds for c in found.costs)
    shown = found.costs if full else found.costs[:TOP_COSTS]
    rows = [
        (
            cost.source or "no line",
            ", ".join(f"{kind} {format_axes(axes)}" for (kind, axes), _ in cost.moves),
            format_count(cost.traffic.count),
            format_bytes(cost.traffic.bytes),
            format_seconds(cost.traffic.seconds),
        )
        for cost in shown
    ]
    rest = found.costs[len(shown) :]
    lines = [
        f"- {cost.source or 'no line'}: {why}." for cost in shown for why in cost.why
    ]
    if rest:
        rest_s = sum(c.traffic.seconds for c in rest)
        lines.append(f"and {format_count(len(rest))} more: {format_seconds(rest_s)}")
    table = Table(
        ("line", "collectives", "count", "bytes", "time"),
        tuple(rows),
        "<<>>>",
        (1, 0),
        tuple(c.traffic.seconds / whole_s if whole_s else 0.0 for c in shown),
    )
    title = (
        f"which lines cost most: {format_bytes(found.wire_bytes)} on the wire,"
        f" {format_seconds(whole_s)} if nothing is hidden"
    )
    return (Section(title, table=table), Section("why", lines=tuple(lines)))


def _held(found: AnyAudit) -> Section:
    memory = found.memory
    if memory is None:
        return Section("")
    facts = (
        ("arguments", format_bytes(memory.argument_bytes)),
        (
            "results",
            f"{format_bytes(memory.output_bytes)}, of which"
            f" {format_bytes(memory.alias_bytes)} reuse arguments",
        ),
        ("everything else", format_bytes(memory.temp_bytes)),
    )
    return Section("memory", facts=facts)


def _inputs(found: AnyAudit, *, full: bool) -> Section:
    """Return the section on the specs that rhino's plan has for the arguments."""
    if found.plan is None:
        return Section("")
    inputs, *_ = value_sections(found.plan, full=full)
    return Section(
        f"what rhino would do instead, {inputs.title}",
        inputs.facts,
        inputs.table,
        (*inputs.lines, "`audit.patch()` says it as a diff of your files."),
    )
