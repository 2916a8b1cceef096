"""Expressions of the user's source, and the values that they produce.

JAX stores with every equation the expression that emitted it, with its columns. All
equations of one expression (`jax.nn.gelu(x)` has nine) produce one value that others
read: the expression's value. A person would write a sharding constraint there.

`Cotangents` has the values of the backward pass that belong to a user's expression.
Reverse differentiation emits the transposed equations of an expression, which keep its
source location. Values that they read from elsewhere in the backward pass are the
cotangent of the expression's value; values that others read from them are contributions
to the cotangents of its operands. Equations that `jax.checkpoint` recomputes are
neither.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rhino_jax._compat import open_jaxpr, user_spans
from rhino_jax.frontend.provenance import is_library_file
from rhino_jax.frontend.regions import closed_region_jaxprs, ops_and_equations
from rhino_jax.ir.axes import crossings
from rhino_jax.ir.program import Op, Program, Region, RegionKind


Read = tuple[int, int, int]
"""A value, the id of the op that reads it, and the operand's position."""


def is_transposed(op: Op) -> bool:
    """Whether an op is of the backward pass, recomputation excluded."""
    return op.source.is_backward and not op.source.is_recomputed


@dataclass(frozen=True)
class Cotangents:
    """The cotangents of a program.

    Attributes:
      maker: value → the op that produces it.
      readers: value → its reads.
      entered: input of a region → the values outside, or of the previous iteration,
        that it is.
    """

    maker: dict[int, Op]
    readers: dict[int, list[Read]]
    entered: dict[int, tuple[int, ...]]

    def is_one(self, value: int) -> bool:
        """Whether the backward pass produced a value."""
        seen, left = {value}, [value]
        while left:
            at = left.pop()
            if at in self.maker:
                if is_transposed(self.maker[at]):
                    return True
                continue
            new = [v for v in self.entered.get(at, ()) if v not in seen]
            seen.update(new)
            left += new
        return False

    def read_by(self, ops: Iterable[Op]) -> list[int]:
        """Return the cotangents that some ops read and others produce."""
        members = list(ops)
        inside = {v for op in members for v in op.results}
        read = dict.fromkeys(v for op in members for v in op.operands)
        return [v for v in read if v not in inside and self.is_one(v)]

    def given_by(self, ops: Iterable[Op]) -> list[int]:
        """Return the values that some ops produce for others, or for nothing."""
        members = list(ops)
        ids = {op.id for op in members}
        return [
            v
            for op in members
            for v in op.results
            if not all(reader in ids for _, reader, _ in self.readers.get(v, ()))
            or v not in self.readers
        ]


def cotangents_of(program: Program) -> Cotangents:
    """Return the producers and readers of a program's values, across regions."""
    found = Cotangents({}, {}, {})
    for op in program.ops:
        found.maker.update((v, op) for v in op.results)
        for i, v in enumerate(op.operands):
            found.readers.setdefault(v, []).append((v, op.id, i))
        if op.call is not None:
            for at in crossings(op):
                outer = tuple(op.operands[i] for i in at.operands)
                found.entered.update((v, (*outer, *at.leaving)) for v in at.entering)
    return found


Span = tuple[int, int, int, int]
"""First line and column, last line and the column after; as in `ast`."""


@dataclass(slots=True)
class ExpressionPlace:
    """One expression, and its values in the program for each of its runs.

    Attributes:
      file, span: location of the expression.
      values: for each run, the values that it produces.
      read: for each run, its reads, in order: value, op and operand position.
      is_loop: whether it is a loop or a branch, which may produce several arrays.
      is_elementwise: whether all of its ops are elementwise.
      is_contracted: whether an op that is not elementwise reads its values.
      inner: values that it produces and no other expression reads.
      is_cheap: whether recomputing it costs no matmul and no loop.
      cotangents: cotangents of its values, each with its reads.
      passed_on: those of them that a later expression passes on unchanged.
      given: contributions to the cotangents of its operands.
    """

    file: str
    span: Span
    values: list[list[int]] = field(default_factory=list)
    read: list[list[Read]] = field(default_factory=list)
    is_loop: bool = False
    is_elementwise: bool = True
    is_contracted: bool = False
    inner: list[int] = field(default_factory=list)
    is_cheap: bool = True
    cotangents: dict[int, list[Read]] = field(default_factory=dict)
    passed_on: set[int] = field(default_factory=set)
    given: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Met:
    """An op with its region and its user's expression.

    Attributes:
      op: the op.
      at: file and span of the expression that emitted it; None if unknown.
      around: file and span of the loop or call around it; None at the top.
      region: identity of its region.
    """

    op: Op
    at: tuple[str, Span] | None
    around: tuple[str, Span] | None
    region: int


def places_of(
    closed_jaxpr: Any, program: Program, cotangents: Cotangents
) -> list[ExpressionPlace]:
    """Return all expressions of the forward pass, in order, with their cotangents.

    Args:
      closed_jaxpr: the jaxpr from which `program` was imported.
      program: the program.
      cotangents: producers and readers of its values.
    """
    everything = [
        m
        for m in _walk(program, program.body, open_jaxpr(closed_jaxpr), None)
        if m.at is not None
    ]
    met = [m for m in everything if not m.op.source.is_backward]
    readers: dict[int, list[_Met]] = defaultdict(list)
    for m in met:
        for value in m.op.operands:
            readers[value].append(m)
    calls = [op.call for op in program.ops if op.call is not None]
    regions = [program.body, *(r for call in calls for r in call.regions)]
    leaving = {v for region in regions for v in region.outputs}
    places: dict[tuple[str, Span], ExpressionPlace] = {}
    groups: dict[tuple[Any, int], list[_Met]] = defaultdict(list)
    for m in met:
        if m.at != m.around:
            groups[m.at, m.region].append(m)
    for (at, _), members in _each_time(groups):
        place = places.setdefault(at, ExpressionPlace(*at))
        found, inside = _own(members, readers, leaving)
        place.values.append(found)
        place.is_elementwise &= all(m.op.is_fusible for m in members)
        place.is_contracted |= any(
            not m.op.is_fusible and m.op.call is None and m.at != at
            for v in found
            for m in readers[v]
        )
        calls = [m.op.call for m in members if m.op.call is not None]
        place.is_loop |= any(call.kind is not RegionKind.CALL for call in calls)
        place.inner += sorted(inside.difference(found))
        place.is_cheap &= not any(
            m.op.traits.is_contraction or m.op.call is not None for m in members
        )
        place.read.append(
            [
                (v, m.op.id, i)
                for m in members
                for i, v in enumerate(m.op.operands)
                if v not in inside and not program.values[v].is_literal
            ]
        )
    _add_backward(places, everything, cotangents)
    _add_sums(places, readers)
    met_before: set[int] = set()
    for place in reversed(places.values()):
        place.passed_on = met_before.intersection(place.cotangents)
        met_before.update(place.cotangents)
    return list(places.values())


def _each_time(
    groups: Mapping[tuple[tuple[str, Span] | None, int], list[_Met]],
) -> Iterator[tuple[tuple[tuple[str, Span], int], list[_Met]]]:
    """Split every group into runs that do not read from each other.

    One expression runs several times in a Python loop.
    """
    for (at, region), members in groups.items():
        assert at is not None
        times: list[tuple[set[int], list[_Met]]] = []
        for m in members:
            reads = [t for t in times if not t[0].isdisjoint(m.op.operands)]
            made = set(m.op.results).union(*(t[0] for t in reads))
            ops = [x for t in reads for x in t[1]]
            times = [t for t in times if t not in reads]
            times.append((made, [*ops, m]))
        yield from (((at, region), ops) for _, ops in times)


def _add_backward(
    places: Mapping[tuple[str, Span], ExpressionPlace],
    met: list[_Met],
    cotangents: Cotangents,
) -> None:
    groups: dict[tuple[tuple[str, Span], int], list[Op]] = defaultdict(list)
    for m in met:
        if m.at is None or m.at == m.around or m.at not in places:
            continue
        if is_transposed(m.op):
            groups[m.at, m.region].append(m.op)
    for (at, _), ops in groups.items():
        places[at].cotangents.update(
            (v, cotangents.readers[v]) for v in cotangents.read_by(ops)
        )
        places[at].given += cotangents.given_by(ops)


def _add_sums(
    places: Mapping[tuple[str, Span], ExpressionPlace],
    readers: Mapping[int, list[_Met]],
) -> None:
    """Give sums the cotangents of their terms.

    No transposed equation of a sum remains; terms that nothing else reads share its
    cotangent.
    """
    made_by = {
        v: place for place in places.values() for made in place.values for v in made
    }
    for place in places.values():
        if place.cotangents or not place.is_elementwise:
            continue
        at = place.file, place.span
        for v in {v for reads in place.read for v, _, _ in reads}:
            if v in made_by and all(m.at == at for m in readers[v]):
                place.cotangents.update(made_by[v].cotangents)


def _own(
    members: list[_Met], readers: Mapping[int, list[_Met]], leaving: set[int]
) -> tuple[list[int], set[int]]:
    """Return the values of an expression that others read, and all that it produces."""
    here = members[0].at
    made = [v for m in members for v in m.op.results]
    read = [v for v in made if any(m.at != here for m in readers[v])]
    if not read:
        used = {v for m in members for v in m.op.operands}
        read = [v for v in made if v in leaving and v not in used]
    return read, set(made)


def _walk(
    program: Program, region: Region, jaxpr: Any, around: tuple[str, Span] | None
) -> Iterator[_Met]:
    for op, eqn in ops_and_equations(program, region, jaxpr):
        at = _place(eqn.source_info) or around
        yield _Met(op, at, around, id(region))
        if op.call is None:
            continue
        inner = closed_region_jaxprs(eqn)
        for sub, closed in zip(op.call.regions, inner, strict=True):
            # The bodies of loops and calls are separate expressions.
            yield from _walk(program, sub, open_jaxpr(closed), at)


def _place(source_info: Any) -> tuple[str, Span] | None:
    for file, span in user_spans(source_info):
        if not is_library_file(file):
            return file, span
    return None


def made_inside(program: Program) -> dict[int, int]:
    """Return result of a call → the value inside of the call that it is."""
    found: dict[int, int] = {}
    for op in program.ops:
        if op.call is not None and op.call.kind is RegionKind.CALL:
            found.update(zip(op.results, op.call.regions[0].outputs, strict=True))
    return found
