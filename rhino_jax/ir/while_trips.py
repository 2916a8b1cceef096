"""User-stated trip counts of `while` loops whose end depends on data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from rhino_jax.ir.op import Op, RegionCall, RegionKind
from rhino_jax.ir.places import at_place
from rhino_jax.ir.program import Program, WhileTrips


EVERYWHERE = ""
"""The place of a trip count that is stated for all loops."""


def loops_ended_by_data(program: Program) -> Iterator[tuple[Op, RegionCall]]:
    """Yield the `while` loops whose trip count does not follow from the program."""
    for op in program.ops:
        call = op.call
        if call is None or call.kind is not RegionKind.WHILE:
            continue
        if not call.is_trip_count_known:
            yield op, call


def with_while_trips(program: Program, stated: WhileTrips) -> Program:
    """Return the program with trip counts as stated; where several places match a loop,
    the last one holds."""
    if not stated:
        return program
    places = [
        (None if place == EVERYWHERE else at_place(place), count)
        for place, count in stated
    ]
    ops = list(program.ops)
    for op, call in loops_ended_by_data(program):
        for is_there, count in places:
            if is_there is None or is_there(op.source):
                ops[op.id] = replace(op, call=replace(call, trip_count=count))
    return replace(program, ops=tuple(ops), while_trips=stated)
