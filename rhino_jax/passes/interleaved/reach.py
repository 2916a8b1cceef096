"""Propagate interleaved storage through a program."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from rhino_jax.frontend.regions import all_equations
from rhino_jax.ir.blocks import InterleavedOrder
from rhino_jax.ir.crossings import crossings
from rhino_jax.ir.program import Op, Program
from rhino_jax.passes.interleaved.links import DimLink, DimRef, links
from rhino_jax.passes.interleaved.moves import (
    DimMove,
    Marks,
    move_of,
    pieces_in_blocks,
    regroup_of,
)


@dataclass(frozen=True, eq=False)
class DimOrders:
    """A program, and how its ops depend on the order of dims.

    Attributes:
      program: the program.
      eqns: op id → the equation that it was imported from.
    """

    program: Program
    eqns: Mapping[int, Any]
    _links: dict[int, list[DimLink]] = field(default_factory=dict)

    @classmethod
    def of(cls, closed: Any, program: Program) -> DimOrders:
        """Return the orders of a closed jaxpr and the program imported from it."""
        return cls(program, {op.id: eqn for op, eqn in all_equations(program, closed)})

    def links(self, op: Op) -> list[DimLink]:
        """Return the index ranges of an op that may be reordered; see `links.links`."""
        if op.id not in self._links:
            self._links[op.id] = links(self.program, op)
        return self._links[op.id]

    def move(self, op: Op) -> DimMove | None:
        """Return the parts of a dim that an op reads or writes; see `moves.move_of`."""
        return move_of(op, self.eqns[op.id]) if op.call is None else None

    @cached_property
    def at(self) -> Mapping[int, list[Op]]:
        """Value id → ops that compute it, read it, or pass it into or out of
        regions."""
        found: dict[int, list[Op]] = defaultdict(list)
        for op in self.program.ops:
            values = {*op.operands, *op.results}
            for at in crossings(op) if op.call is not None else ():
                values.update(at.entering, at.leaving)
            for v in values:
                found[v].append(op)
        return found


def reach(ops: DimOrders, seeds: Marks) -> dict[DimRef, InterleavedOrder] | None:
    """Return all dims that are interleaved where the seeds are.

    Args:
      ops: the program, and how its ops depend on the order of dims.
      seeds: interleaved dims to start from.
    Returns:
      Interleaved dims → their order; None where one dim would have two orders.
    """
    marks: dict[DimRef, InterleavedOrder] = {}
    queue: list[DimRef] = []

    def mark(place: DimRef, blocks: InterleavedOrder) -> bool:
        if place not in marks:
            marks[place] = blocks
            queue.append(place)
        return marks[place] == blocks

    if not all(mark(place, blocks) for place, blocks in seeds.items()):
        return None
    while queue:
        value = queue.pop().value
        for op in ops.at[value]:
            for link in ops.links(op):
                major = major_of(link, marks)
                if major is None:
                    continue
                for place, minor in zip(link.places, link.minor, strict=True):
                    blocks = major.scaled(minor)
                    assert blocks is not None
                    if not mark(place, blocks):
                        return None
            move = ops.move(op)
            pieces = None if move is None else pieces_in_blocks(move, marks)
            for place, blocks in (pieces or {}).items():
                if not mark(place, blocks):
                    return None
    return marks


def major_of(link: DimLink, marks: Marks) -> InterleavedOrder | None:
    """Return the interleaved order of the index range that linked dims hold.

    Returns:
      None where no dim is interleaved, or blocks would divide an index's elements.
    """
    for place, minor in zip(link.places, link.minor, strict=True):
        if place in marks:
            return marks[place].scaled(over=minor)
    return None


@dataclass(frozen=True, slots=True)
class Handled:
    """Dims that an op can read and write in interleaved order.

    Attributes:
      operands, results: (position of the operand or result, dim).
    """

    operands: frozenset[tuple[int, int]]
    results: frozenset[tuple[int, int]]


def handled(ops: DimOrders, op: Op, marks: Marks) -> Handled:
    """Return the dims that an op can read and write in interleaved order.

    It needs all other dims in logical order.
    """
    operands: set[tuple[int, int]] = set()
    results: set[tuple[int, int]] = set()
    for link in ops.links(op):
        if major_of(link, marks) is not None:
            operands |= link.operands
            results |= link.results
    move = ops.move(op)
    if move is not None and pieces_in_blocks(move, marks) is not None:
        for found, values in ((operands, op.operands), (results, op.results)):
            found |= {
                (i, move.dim)
                for i, v in enumerate(values)
                if ops.program.values[v].rank
            }
    regroup = regroup_of(op, marks)
    if regroup is not None:
        (operands if regroup.is_split else results).add((0, regroup.dim))
    return Handled(frozenset(operands), frozenset(results))
