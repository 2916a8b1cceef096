"""Which of a user's own shardings asks for a collective.

The compiler names the operation around a collective, not the choice behind it. The
choice lies near in the program: a sharding constraint that leaves an axis out, or an
argument that the axis cuts. Both are searched from the operation's line, backwards
and forwards through operations that do not change where data lies (elementwise ones,
loops and calls).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rhino_jax._compat import open_jaxpr, user_frames
from rhino_jax.frontend.cells import cell_of
from rhino_jax.frontend.regions import ops_and_equations, region_jaxprs
from rhino_jax.ir.program import (
    USERS_CONSTRAINT,
    Op,
    Program,
    Region,
    RegionKind,
    Source,
)


_QUOTED = re.compile(r"'([^']+)'")
_MAX_NAMED = 4
"""Choices that are named for one collective."""

_MAX_STEPS = 64
"""Values visited in each direction; beyond, a choice no longer lies near."""


@dataclass(frozen=True, slots=True)
class Culprits:
    """Finds the choices near a line.

    Attributes:
      ops_on: the user's line → ops on it.
      makers: value → the op that makes it.
      readers: value → the ops that read it.
      came_from, goes_to: value → values that are the same data across the border of
        a loop, a branch or a call.
      args: value → (tree path, axes that cut it) of the sharded arguments.
      lines: constraint (by op) → its line, and the line that calls a helper there.
    """

    ops_on: Mapping[str, tuple[Op, ...]]
    makers: Mapping[int, Op]
    readers: Mapping[int, tuple[Op, ...]]
    came_from: Mapping[int, tuple[int, ...]]
    goes_to: Mapping[int, tuple[int, ...]]
    args: Mapping[int, tuple[str, frozenset[str]]]
    lines: Mapping[int, str]

    def of(self, source: str, axes: Iterable[str], *, is_gather: bool) -> list[str]:
        """What asks for data to be moved over axes on a line, in words.

        Args:
          source: the line.
          axes: the axes that a collective there runs over.
          is_gather: whether it makes whole what they cut; a constraint that keeps
            them all then asks for nothing.
        """
        search = _CulpritSearch(self, frozenset(axes), is_gather)
        found: dict[str, None] = {}
        for op in self.ops_on.get(source, ()):
            found |= dict.fromkeys(search.asked(op))
            for value in op.operands:
                found |= dict.fromkeys(search.before(value))
            for value in op.results:
                found |= dict.fromkeys(search.after(value))
        words = list(found)
        rest = len(words) - _MAX_NAMED
        return [*words[:_MAX_NAMED], f"and {rest} more"] if rest > 0 else words


@dataclass(frozen=True, slots=True)
class _CulpritSearch:
    """The search for what moves data over some axes."""

    near: Culprits
    axes: frozenset[str]
    is_gather: bool

    def before(self, value: int) -> Iterator[str]:
        """Arguments that the axes cut, and constraints, that a value comes from."""
        queue, seen = [value], {value}
        while queue and len(seen) < _MAX_STEPS:
            at = queue.pop(0)
            path, cut = self.near.args.get(at, ("", frozenset()))
            if cut & self.axes:
                yield f"`{path}` is cut over {' × '.join(sorted(cut & self.axes))}"
            maker = self.near.makers.get(at)
            new = list(self.near.came_from.get(at, ()))
            if maker is not None:
                yield from self.asked(maker)
                new += maker.operands if _is_passing(maker) else ()
            queue += [v for v in new if v not in seen]
            seen |= set(new)

    def after(self, value: int) -> Iterator[str]:
        """Constraints that a value runs into."""
        queue, seen = [value], {value}
        while queue and len(seen) < _MAX_STEPS:
            at = queue.pop(0)
            new = list(self.near.goes_to.get(at, ()))
            for reader in self.near.readers.get(at, ()):
                yield from self.asked(reader)
                new += reader.results if _is_passing(reader) else ()
            queue += [v for v in new if v not in seen]
            seen |= set(new)

    def asked(self, op: Op) -> Iterator[str]:
        """A constraint in words, if it can be what moves data."""
        if op.name != USERS_CONSTRAINT:
            return
        if self.is_gather and self.axes <= set(_QUOTED.findall(op.label)):
            return
        yield f"the constraint {op.label} at {self.near.lines[op.id]} asks for it"


def _is_passing(op: Op) -> bool:
    """Whether data lies after an op as it did before."""
    return op.is_fusible and op.name != USERS_CONSTRAINT


def culprits_of(
    program: Program, closed_jaxpr: Any, cut_by: Mapping[str, frozenset[str]]
) -> Culprits:
    """The search over a program as its user wrote it.

    Args:
      program: with its constraints.
      closed_jaxpr: what it was imported from.
      cut_by: tree path of an argument → mesh axes that cut it.
    """
    ops_on: dict[str, list[Op]] = defaultdict(list)
    readers: dict[int, list[Op]] = defaultdict(list)
    makers: dict[int, Op] = {}
    came_from: dict[int, list[int]] = defaultdict(list)
    goes_to: dict[int, list[int]] = defaultdict(list)
    for op in program.ops:
        # XLA slices a loop's operands on the loop's own line.
        ops_on[str(op.source)].append(op)
        if op.call is not None:
            for outer, inner in _borders(op):
                came_from[inner].append(outer)
                goes_to[outer].append(inner)
            continue
        makers |= dict.fromkeys(op.results, op)
        for value in op.operands:
            readers[value].append(op)
    args = {
        i.value: (i.path, cut_by[i.path]) for i in program.inputs if i.path in cut_by
    }
    return Culprits(
        {k: tuple(v) for k, v in ops_on.items()},
        makers,
        {k: tuple(v) for k, v in readers.items()},
        {k: tuple(v) for k, v in came_from.items()},
        {k: tuple(v) for k, v in goes_to.items()},
        args,
        dict(_lines(program, program.body, open_jaxpr(closed_jaxpr))),
    )


def _lines(program: Program, region: Region, jaxpr: Any) -> Iterator[tuple[int, str]]:
    """The lines of all constraints; region and jaxpr are walked as importer and apply
    walk them, op by equation."""
    for op, eqn in ops_and_equations(program, region, jaxpr):
        if op.name == USERS_CONSTRAINT:
            yield op.id, _line(op, eqn)
        if op.call is not None:
            for inner, body in zip(op.call.regions, region_jaxprs(eqn), strict=True):
                yield from _lines(program, inner, body)


def _line(op: Op, eqn: Any) -> str:
    """`layers.py:12 (pin), from gpt.py:70 (mlp)`: users pin through helpers."""
    frames = [
        str(Source(cell_of(file), line, function.rsplit("<locals>.", 1)[-1]))
        for file, line, function in user_frames(eqn.source_info)
    ]
    own = str(op.source)
    if own not in frames[:-1]:
        return own
    return f"{own}, from {frames[frames.index(own) + 1]}"


def _borders(op: Op) -> list[tuple[int, int]]:
    """(value outside, the same inside) where data enters, the reverse where it leaves.

    A pair reads: the second holds what the first held.
    """
    assert op.call is not None
    call = op.call
    pairs: list[tuple[int, int]] = []
    for i, region in enumerate(call.regions):
        operands = op.operands
        if call.kind is RegionKind.COND:
            operands = operands[1:]
        elif call.kind is RegionKind.WHILE:
            head = call.num_cond_consts
            carries = operands[head + call.num_consts :]
            own = operands[:head] if i == 0 else operands[head : head + call.num_consts]
            operands = (*own, *carries)
        pairs += zip(operands, region.inputs, strict=True)
        if call.kind is not RegionKind.WHILE or i == 1:
            pairs += zip(region.outputs, op.results, strict=True)
    return pairs
