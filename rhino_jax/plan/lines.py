"""The user's lines that a plan shows, as they are now.

A plan is found again, or read from a file, after its user has moved code about: it
computes the same, on other lines. What names a line in a plan's text therefore has an
op of the program beside it, and is written anew from the program as it was traced last.
Collectives know their op; of other ops that shared a line and have parted, the first
one's line is shown.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from rhino_jax.ir.program import Program, Source
from rhino_jax.plan.plan import AnyPlan, Plan
from rhino_jax.plan.records import Collective, Holding


_OP = re.compile(r" #(\d+)$")
"""How the op of a collective ends: with its number in the program."""


def with_lines(plan: AnyPlan, program: Program) -> AnyPlan:
    """The plan with the lines of this program in place of those that it was made for.

    Args:
      plan: a plan.
      program: as the plan's: of equal fingerprint.
    """
    if not plan.lines:
        return replace(plan, lines=_found(plan, program))
    sources = [op.source for op in program.ops]
    now = {text: sources[op] for text, op in plan.lines.items()}
    moved = {text: source for text, source in now.items() if str(source) != text}
    if not moved:
        return plan
    lines = {str(sources[op]): op for op in plan.lines.values()}
    return replace(_written_anew(plan, moved, program), lines=lines)


def _found(plan: Plan, program: Program) -> dict[str, int]:
    """Each line that a plan's text names → the first op there."""
    text = "\n".join(_texts(plan))
    lines: dict[str, int] = {}
    for op in program.ops:
        if op.source.file:
            lines.setdefault(str(op.source), op.id)
    return {line: op for line, op in lines.items() if _place(line) in text}


def _texts(plan: Plan) -> Iterator[str]:
    for c in plan.collectives:
        yield from (c.source, c.reason)
    for h in plan.at_peak:
        yield from (h.what, h.source, h.context)
    yield from plan.notes
    yield from plan.pins


def _written_anew(
    plan: AnyPlan, moved: Mapping[str, Source], program: Program
) -> AnyPlan:
    text = _substitution(moved)

    def collective(c: Collective) -> Collective:
        op = _OP.search(c.op)
        source = text(c.source)
        if op is not None and c.source:  # two ops of one line may have parted
            source = str(program.ops[int(op[1])].source)
        return replace(c, source=source, reason=text(c.reason))

    def holding(h: Holding) -> Holding:
        return replace(
            h, what=text(h.what), source=text(h.source), context=text(h.context)
        )

    return replace(
        plan,
        collectives=tuple(map(collective, plan.collectives)),
        at_peak=tuple(map(holding, plan.at_peak)),
        notes=tuple(map(text, plan.notes)),
        pins={text(key): spec for key, spec in plan.pins.items()},
    )


def _substitution(moved: Mapping[str, Source]) -> Callable[[str], str]:
    """Puts new lines in place of old ones, in both forms, all at once."""
    found: dict[str, str] = {}
    for old, source in moved.items():
        found[old] = str(source)
        found.setdefault(_place(old), _place(str(source)))
    longest_first = sorted(found, key=len, reverse=True)
    any_of = "|".join(map(re.escape, longest_first))
    pattern = re.compile(rf"(?<![\w./])(?:{any_of})(?!\d)")
    return lambda text: pattern.sub(lambda m: found[m[0]], text)


def _place(line: str) -> str:
    """`model.py:61` of `model.py:61 (attend)`."""
    return line.partition(" (")[0]
