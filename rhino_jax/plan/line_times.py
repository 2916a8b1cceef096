"""Predicted seconds of a step by source line."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, replace

from rhino_jax.plan.records import Collective, LineTime


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
