"""The program as nested regions: source lines that unfold to ops with their specs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from rhino_jax.explain.report.step import program_of
from rhino_jax.explain.report.values import format_array
from rhino_jax.ir.program import Op, Program, Region
from rhino_jax.ir.spec import format_spec
from rhino_jax.units import format_flops


if TYPE_CHECKING:
    from rhino_jax.plan.plan import PlanData

MAX_OPS = 1500
"""Maximum number of ops written, about a megabyte; `str(program)` shows all."""


def regions(plan: PlanData) -> str:
    """Draw the planned program; empty if it is unknown, or has stages."""
    program = program_of(plan)
    if program is None or plan.has_tasks:
        return ""
    writer = _Writer(program, plan, itertools.count())
    inside = "".join(writer.region(program.body))
    more = len(program.ops) - MAX_OPS
    note = f"<p>and {more:,} ops more</p>" if more > 0 else ""
    return f'<div class="program" style="text-align:left">{inside}{note}</div>'


@dataclass(frozen=True, slots=True)
class _Writer:
    program: Program
    plan: PlanData
    written: Iterator[int]

    def region(self, region: Region) -> Iterator[str]:
        """Yield elements of a region, consecutive ops of one source line in one."""
        ops = [self.program.ops[i] for i in region.ops]
        for line, group in itertools.groupby(ops, key=lambda op: str(op.source)):
            members = list(group)
            last = members[-1]
            flops = sum(op.flops for op in members)
            said = f"{len(members)} ops" if len(members) > 1 else last.name
            if flops:
                said += f", {format_flops(flops)}"
            inside = "".join(self.op(op) for op in members)
            if not inside:
                return
            yield (
                f'<details class="ops"><summary><code>{escape(line)}</code>'
                f" {escape(said)} → {self.made(last)}</summary>{inside}</details>"
            )

    def op(self, op: Op) -> str:
        if next(self.written) >= MAX_OPS:
            return ""
        label = f" {escape(op.label)}" if op.label else ""
        said = f"{escape(op.name)}{label} → {self.made(op)}"
        if op.call is None:
            return f'<div class="op">{said}</div>'
        parts = "".join(x for r in op.call.regions for x in self.region(r))
        count = f", {op.call.trip_count:,} times" if op.call.trip_count > 1 else ""
        return (
            f'<details class="ops"><summary>{op.call.kind.value}{count}: {said}'
            f"</summary>{parts}</details>"
        )

    def made(self, op: Op) -> str:
        names = [name for name, _ in self.plan.mesh_axes]
        specs = self.plan.decisions.values
        shown = []
        for v in op.results[:2]:
            value = self.program.values[v]
            spec = specs.get(v)
            text = format_array(value.shape, value.dtype)
            shown.append(f"{text} {format_spec(spec, names)}" if spec else text)
        more = " …" if len(op.results) > len(shown) else ""
        return f"<code>{escape('; '.join(shown))}{more}</code>"
