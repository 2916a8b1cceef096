"""Which expression of the user's source makes which value.

JAX keeps of every equation the expression that asked for it, with its columns. All
equations of one expression (`jax.nn.gelu(x)` has nine) make one value that others read:
the expression's own. That is where a person would write a sharding constraint.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rhino_jax._compat import open_jaxpr, user_spans
from rhino_jax.frontend.provenance import is_library_file
from rhino_jax.frontend.regions import closed_region_jaxprs
from rhino_jax.ir.program import Op, Program, Region, RegionKind


Span = tuple[int, int, int, int]
"""First line and column, last line and the column after; as of `ast`."""


@dataclass(slots=True)
class Place:
    """One expression, and what it is in the program, each time that it is met.

    Attributes:
      file, span: where.
      values: of each time, what it makes.
      read: of each time, the values that it reads, in order, each with the op and
        position where.
      is_loop: whether it is a loop or a branch, which may make several arrays.
      is_elementwise: whether nothing in it does more than pass over its operands.
    """

    file: str
    span: Span
    values: list[list[int]] = field(default_factory=list)
    read: list[list[tuple[int, int, int]]] = field(default_factory=list)
    is_loop: bool = False
    is_elementwise: bool = True


@dataclass(frozen=True, slots=True)
class _Met:
    """An op where it is met: in its region, in the expression of its user."""

    op: Op
    at: tuple[str, Span] | None
    around: tuple[str, Span] | None
    region: int


def places_of(closed_jaxpr: Any, program: Program) -> list[Place]:
    """All expressions of the forward computation, in order.

    What differentiation adds is left out: constraints on values hold for cotangents
    too.

    Args:
      closed_jaxpr: what `program` was imported from.
      program: the program.
    """
    met = [
        m
        for m in _walk(program, program.body, open_jaxpr(closed_jaxpr), None)
        if m.at is not None and not m.op.source.is_backward
    ]
    readers: dict[int, list[_Met]] = defaultdict(list)
    for m in met:
        for value in m.op.operands:
            readers[value].append(m)
    leaving = {v for region in _regions(program) for v in region.outputs}
    places: dict[tuple[str, Span], Place] = {}
    groups: dict[tuple[Any, int], list[_Met]] = defaultdict(list)
    for m in met:
        if m.at != m.around:
            groups[m.at, m.region].append(m)
    for (at, _), members in groups.items():
        place = places.setdefault(at, Place(*at))
        found, inside = _own(members, readers, leaving)
        place.values.append(found)
        place.is_elementwise &= all(m.op.is_fusible for m in members)
        place.is_loop |= any(_is_loop(m.op) for m in members)
        place.read.append(
            [
                (v, m.op.id, i)
                for m in members
                for i, v in enumerate(m.op.operands)
                if v not in inside and not program.values[v].is_literal
            ]
        )
    return list(places.values())


def _own(
    members: list[_Met], readers: Mapping[int, list[_Met]], leaving: set[int]
) -> tuple[list[int], set[int]]:
    """The values of an expression that others read, and all that it makes."""
    here = members[0].at
    inside = {v for m in members for v in m.op.results}
    read = [v for m in members for v in m.op.results if _is_read(readers[v], here)]
    if not read:
        used = {v for m in members for v in m.op.operands}
        read = [
            v for m in members for v in m.op.results if v in leaving and v not in used
        ]
    return read, inside


def _is_loop(op: Op) -> bool:
    return op.call is not None and op.call.kind is not RegionKind.CALL


def _is_read(readers: list[_Met], here: tuple[str, Span] | None) -> bool:
    return any(m.at != here for m in readers)


def _walk(
    program: Program, region: Region, jaxpr: Any, around: tuple[str, Span] | None
) -> Iterator[_Met]:
    for op_id, eqn in zip(region.ops, jaxpr.eqns, strict=True):
        op = program.ops[op_id]
        at = _place(eqn.source_info) or around
        yield _Met(op, at, around, id(region))
        if op.call is None:
            continue
        inner = closed_region_jaxprs(eqn)
        for sub, closed in zip(op.call.regions, inner, strict=True):
            # What a loop runs are expressions of their own, as are calls.
            yield from _walk(program, sub, open_jaxpr(closed), at)


def _place(source_info: Any) -> tuple[str, Span] | None:
    for file, span in user_spans(source_info):
        if not is_library_file(file):
            return file, span
    return None


def _regions(program: Program) -> Iterator[Region]:
    yield program.body
    for op in program.ops:
        if op.call is not None:
            yield from op.call.regions


def made_inside(program: Program) -> dict[int, int]:
    """What a call gives → the value inside that it is."""
    found: dict[int, int] = {}
    for op in program.ops:
        if op.call is not None and op.call.kind is RegionKind.CALL:
            found.update(zip(op.results, op.call.regions[0].outputs, strict=True))
    return found
