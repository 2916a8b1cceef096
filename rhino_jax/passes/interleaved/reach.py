"""Propagate interleaved storage through a program.

Where all operands of an op have the elements of an index range in the same permuted
order, and the op does not depend on that order, it computes its results in that order
and is otherwise unchanged: a matmul along its free and contracted dims, a sum,
elementwise ops.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from rhino_jax.frontend.regions import all_equations
from rhino_jax.frontend.rules.shape import DimMove, move_of
from rhino_jax.ir.axes import AxisEnd, crossings, ends_across, ends_of
from rhino_jax.ir.factor import FactorKind
from rhino_jax.ir.program import Op, Program
from rhino_jax.ir.traits import OpKind
from rhino_jax.ir.transform import InterleavedOrder
from rhino_jax.passes.interleaved.moves import (
    DimRef,
    Marks,
    pieces_in_blocks,
    regroup_of,
)


_FREE = frozenset(
    {
        OpKind.ELEMENTWISE,
        OpKind.EXPONENTIAL,
        OpKind.CONVERSION,
        OpKind.IDENTITY,
        OpKind.BROADCAST,
        OpKind.MOVEMENT,
        OpKind.CONTRACTION,
        OpKind.REDUCTION,
        OpKind.LOOKUP,
        OpKind.SCATTER,
        OpKind.UPDATE,
    }
)
"""Kinds of ops that depend only on the values of elements along a parallel dim.
Generators depend on their positions, kernels may, and convolutions group them."""

_SUMS = frozenset({OpKind.CONTRACTION, OpKind.REDUCTION})
"""Kinds of ops that sum over dims."""


Link = Sequence[AxisEnd]
"""The dims that hold one index range, whose order an op does not depend on."""


def _links(program: Program, op: Op) -> list[Link]:
    """Return the index ranges of an op whose order it does not depend on."""
    if op.call is not None:
        return [*ends_across(program, op)]
    if op.rule is None or not op.is_known or op.manual is not None:
        return []
    kind = op.traits.kind
    if kind not in _FREE:
        return []
    found: list[Link] = []
    for f, factor in enumerate(op.rule.factors):
        is_summed = factor.kind is FactorKind.REDUCE and kind in _SUMS
        if not (factor.kind is FactorKind.PARALLEL or (is_summed and factor.reducer)):
            continue
        ends = ends_of(op, f)
        is_read = kind is OpKind.BROADCAST or any(e.operand is not None for e in ends)
        if is_read and all(end.span.outer == 1 for end in ends):
            found.append(ends)
    return found


@dataclass(frozen=True, eq=False)
class DimOrders:
    """A program, and how its ops depend on the order of dims.

    Attributes:
      program: the program.
      eqns: op id → the equation that it was imported from.
    """

    program: Program
    eqns: Mapping[int, Any]
    _links: dict[int, list[Link]] = field(default_factory=dict)

    @classmethod
    def of(cls, closed: Any, program: Program) -> DimOrders:
        """Return the orders of a closed jaxpr and the program imported from it."""
        return cls(program, {op.id: eqn for op, eqn in all_equations(program, closed)})

    def links(self, op: Op) -> list[Link]:
        """Return the index ranges of an op that may be reordered."""
        if op.id not in self._links:
            self._links[op.id] = _links(self.program, op)
        return self._links[op.id]

    def move(self, op: Op) -> DimMove | None:
        """Return the parts of a dim that an op reads or writes; see `shape.move_of`."""
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
                major = _major_of(link, marks)
                if major is None:
                    continue
                for end in link:
                    blocks = major.scaled(end.span.inner)
                    assert blocks is not None
                    if not mark(DimRef(end.value, end.span.dim), blocks):
                        return None
            move = ops.move(op)
            pieces = None if move is None else pieces_in_blocks(move, marks)
            for place, blocks in (pieces or {}).items():
                if not mark(place, blocks):
                    return None
    return marks


def _major_of(link: Link, marks: Marks) -> InterleavedOrder | None:
    """Return the interleaved order of the index range that linked dims hold.

    Returns:
      None where no dim is interleaved, or blocks would divide an index's elements.
    """
    for end in link:
        blocks = marks.get(DimRef(end.value, end.span.dim))
        if blocks is not None:
            return blocks.scaled(over=end.span.inner)
    return None


Dims = set[tuple[int, int]]
"""(position of an operand or result, dim)."""


def handled(ops: DimOrders, op: Op, marks: Marks) -> tuple[Dims, Dims]:
    """Return the dims that an op can read and write in interleaved order.

    It needs all other dims in logical order.

    Returns:
      Dims of operands, and dims of results.
    """
    operands: Dims = set()
    results: Dims = set()
    for link in ops.links(op):
        if _major_of(link, marks) is not None:
            for end in link:
                if end.operand is not None:
                    operands.add((end.operand, end.span.dim))
                elif end.result is not None:
                    results.add((end.result, end.span.dim))
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
    return operands, results
