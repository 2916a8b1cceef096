"""The `while` loops of a program whose trip count is not known before it runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rhino_jax.errors import RhinoError, nearest
from rhino_jax.ir.places import (
    EVERYWHERE,
    at_place,
    loops_ended_by_data,
    with_while_trips,
)
from rhino_jax.ir.program import Program, WhileTrips
from rhino_jax.plan.records import WhileLoop
from rhino_jax.utils.keywords import brief, whole


KEYWORD = "while_trips"

MAX_TRIPS = 2**31 - 1
"""Largest trip count: loops count in int32."""


class Stated(tuple[tuple[str, int], ...]):
    """(place, trip count) pairs that were already parsed from the keyword's value."""


def read_while_trips(what: str, value: Any) -> WhileTrips:
    """Parse trip counts, one or a mapping by place, to (place, count) pairs.

    Raises:
      RhinoError: it is neither.
    """
    if value is None:
        return Stated()
    if isinstance(value, Stated):
        return value
    given = value if isinstance(value, Mapping) else {"*": value}
    found = [
        (EVERYWHERE if place == "*" else place, whole(count))
        for place, count in given.items()
        if isinstance(place, str) and place.strip()
    ]
    pairs = Stated((p, n) for p, n in found if n is not None and 0 <= n <= MAX_TRIPS)
    if not pairs or len(pairs) < len(given):
        raise RhinoError(
            f"{what}: {KEYWORD} takes a number of trips, or numbers by place.",
            where=f"{KEYWORD}=",
            numbers=f"got {brief(value)}",
            fix=f"write {KEYWORD}=20, or by line: {KEYWORD}={{'model.py:61': 20}}.",
        )
    return pairs


def with_stated_trips(what: str, program: Program, stated: WhileTrips) -> Program:
    """Return the program with the stated trip counts.

    Raises:
      RhinoError: no loop with a data-dependent trip count is at a place.
    """
    if not stated:
        return program
    sources = [op.source for op, _ in loops_ended_by_data(program)]
    for place, _ in stated:
        if place == EVERYWHERE or any(map(at_place(place), sources)):
            continue
        lines = [f"{s.file.rsplit('/', 1)[-1]}:{s.line}" for s in sources]
        raise RhinoError(
            f"{what}: {KEYWORD} names {place!r}, where `{program.name}` has no `while`"
            f" loop that data may end.{nearest(place, lines)}",
            where=f"{KEYWORD}={{{place!r}: …}}",
            numbers=f"such loops: {', '.join(map(str, sources)) or 'none'}",
            fix="name the line of the loop, its function or scope; of a loop that"
            " counts up to a bound, the program says how often it runs.",
        )
    return with_while_trips(program, stated)


def while_loops_of(program: Program) -> tuple[WhileLoop, ...]:
    """Return the loops with data-dependent trip counts, each line and count once."""
    stated = [at_place(p) for p, _ in program.while_trips if p != EVERYWHERE]
    is_everywhere = len(stated) < len(program.while_trips)
    found: dict[WhileLoop, None] = {}
    for op, call in loops_ended_by_data(program):
        if is_everywhere or any(is_there(op.source) for is_there in stated):
            basis = "stated"
        else:
            basis = "bound" if call.max_trip_count is not None else "assumed"
        loop = WhileLoop(str(op.source), call.trip_count, basis)
        found[loop] = None
    return tuple(found)
