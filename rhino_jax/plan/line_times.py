"""Seconds of a step by the user's lines: sums, and what collectives add."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, replace

from rhino_jax.plan.records import Collective, LineTime


_AMOUNTS = [item.name for item in fields(LineTime) if item.name != "source"]


def summed(lines: Iterable[LineTime]) -> tuple[LineTime, ...]:
    """Return one entry of every line, those with the most seconds first."""
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
    """Return the lines with this share of all seconds and operations."""
    return [
        replace(line, **{n: share * getattr(line, n) for n in _AMOUNTS})
        for line in lines
    ]


def sent(collectives: Iterable[Collective], communication_s: float) -> list[LineTime]:
    """Return the lines of collectives, of each the same share not hidden.

    Args:
      collectives: of a plan.
      communication_s: seconds of all of them that nothing hides.
    """
    collectives = list(collectives)
    whole_s = sum(c.seconds for c in collectives)
    share = communication_s / whole_s if whole_s else 0.0
    return [LineTime(c.source, communication_s=share * c.seconds) for c in collectives]
