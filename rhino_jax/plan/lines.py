"""Source lines in a plan, updated to the user's current source.

A plan may be loaded from the cache or a file after its user has moved code: the program
is the same, on other lines. Each source line that a plan's text names is therefore
stored with an op of the program, and is rewritten from the program as it was traced
last. Collectives know their op; if other ops shared a line and no longer do, the line
of the first one is shown.

`LineTime`s, the predicted seconds of a step by source line, are summed and scaled here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, replace
from typing import TypeVar

from rhino_jax.cost.corrections import OpTimes
from rhino_jax.ir.program import Program, Source
from rhino_jax.plan.plan import AnyPlan, PlanData
from rhino_jax.plan.records import (
    Collective,
    LineSpan,
    LineTime,
    LoopSpan,
    PeakValue,
    Timeline,
    WhileLoop,
)
from rhino_jax.plan.while_loops import while_loops_of


_AMOUNTS = [item.name for item in fields(LineTime) if item.name != "source"]


def summed(lines: Iterable[LineTime]) -> tuple[LineTime, ...]:
    """Return one entry per source line, those with the most seconds first."""
    found: dict[str, LineTime] = {}
    for line in lines:
        before = found.get(line.source)
        if before is not None:
            both = {n: getattr(before, n) + getattr(line, n) for n in _AMOUNTS}
            line = replace(before, **both)
        found[line.source] = line
    ordered = sorted(found.values(), key=lambda line: (-line.seconds, line.source))
    return tuple(line for line in ordered if line.seconds)


def scaled(lines: Iterable[LineTime], share: float) -> list[LineTime]:
    """Return the entries with all seconds and operations multiplied by `share`."""
    return [
        replace(line, **{n: share * getattr(line, n) for n in _AMOUNTS})
        for line in lines
    ]


def sent(collectives: Iterable[Collective], communication_s: float) -> list[LineTime]:
    """Return one entry per collective, with its share of exposed communication.

    Args:
      collectives: collectives of a plan.
      communication_s: seconds of all collectives that no compute hides, divided in
        proportion to each one's own seconds.
    """
    collectives = list(collectives)
    whole_s = sum(c.seconds for c in collectives)
    share = communication_s / whole_s if whole_s else 0.0
    return [LineTime(c.source, communication_s=share * c.seconds) for c in collectives]


Place = tuple[int, int]
"""(op id, index of a collective in a manually sharded op; -1 for the op itself)."""


def with_lines(plan: AnyPlan, program: Program) -> AnyPlan:
    """Return the plan with source lines of this program in place of stored ones.

    Args:
      plan: a plan.
      program: a program with the plan's fingerprint.
    """
    if not plan.while_loops:
        plan = replace(plan, while_loops=while_loops_of(program))
    if not plan.lines:
        return replace(plan, lines=_found(plan, program))
    now = {text: _source_at(place, program) for text, place in plan.lines.items()}
    moved = {text: source for text, source in now.items() if str(source) != text}
    if not moved:
        return plan
    lines = {str(now[text]): place for text, place in plan.lines.items()}
    return replace(_written_anew(plan, moved, program), lines=lines)


def _source_at(place: Place, program: Program) -> Source:
    op, inside = program.ops[place[0]], place[1]
    if op.manual is None or not 0 <= inside < len(op.manual.collectives):
        return op.source
    return op.manual.collectives[inside].source


def _found(plan: PlanData, program: Program) -> dict[str, Place]:
    """Return each source line in a plan's text → the first op on it."""
    text = "\n".join(_texts(plan))
    lines: dict[str, Place] = {}
    for op in program.ops:
        inside = () if op.manual is None else op.manual.collectives
        sources = [(op.source, -1), *((c.source, k) for k, c in enumerate(inside))]
        for source, k in sources:
            if source.file:
                lines.setdefault(str(source), (op.id, k))
    return {line: at for line, at in lines.items() if _short(line) in text}


def _texts(plan: PlanData) -> Iterator[str]:
    for c in plan.collectives:
        yield from (c.source, c.reason)
    for h in plan.at_peak:
        yield from (h.what, h.source, h.context)
    yield from (line.source for line in plan.line_times)
    yield from (span.source for span in plan.timeline.spans)
    yield from (loop.source for loop in plan.timeline.loops)
    yield from (loop.source for loop in plan.while_loops)
    yield from (times.source for times in plan.corrections.ops)
    yield from plan.notes
    yield from plan.pins


Placed = TypeVar("Placed", LineTime, LoopSpan, WhileLoop, OpTimes)


def _written_anew(
    plan: AnyPlan, moved: Mapping[str, Source], program: Program
) -> AnyPlan:
    text = _substitution(moved)

    def collective(c: Collective) -> Collective:
        source = text(c.source)
        op = None if c.op_id is None else program.ops[c.op_id]
        if op is not None and op.manual is None and c.source:
            source = str(op.source)  # two ops of one line may now be on two
        return replace(c, source=source, reason=text(c.reason))

    def holding(h: PeakValue) -> PeakValue:
        return replace(
            h, what=text(h.what), source=text(h.source), context=text(h.context)
        )

    def span(x: LineSpan) -> LineSpan:
        return replace(x, source=str(program.ops[x.first_op].source))

    def at_lines(records: Iterable[Placed]) -> tuple[Placed, ...]:
        return tuple(replace(x, source=text(x.source)) for x in records)

    return replace(
        plan,
        collectives=tuple(map(collective, plan.collectives)),
        at_peak=tuple(map(holding, plan.at_peak)),
        line_times=at_lines(plan.line_times),
        timeline=Timeline(
            tuple(map(span, plan.timeline.spans)), at_lines(plan.timeline.loops)
        ),
        while_loops=at_lines(plan.while_loops),
        corrections=replace(plan.corrections, ops=at_lines(plan.corrections.ops)),
        notes=tuple(map(text, plan.notes)),
        pins={text(key): spec for key, spec in plan.pins.items()},
    )


def _substitution(moved: Mapping[str, Source]) -> Callable[[str], str]:
    """Return a function that replaces old lines by new ones, in both forms, in one
    pass."""
    found: dict[str, str] = {}
    for old, source in moved.items():
        found[old] = str(source)
        found.setdefault(_short(old), _short(str(source)))
    longest_first = sorted(found, key=len, reverse=True)
    any_of = "|".join(map(re.escape, longest_first))
    pattern = re.compile(rf"(?<![\w./])(?:{any_of})(?!\d)")
    return lambda text: pattern.sub(lambda m: found[m[0]], text)


def _short(line: str) -> str:
    """Return `model.py:61` of `model.py:61 (attend)`."""
    return line.partition(" (")[0]
