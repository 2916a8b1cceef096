"""Dims worth interleaving: of fused weights that the program splits into parts, and of
batches that it concatenates; and interleaved storage, propagated through a program.

Where all operands of an op have the elements of an index range in the same permuted
order, and the op does not depend on that order, it computes its results in that order
and is otherwise unchanged: a matmul along its free and contracted dims, a sum,
elementwise ops.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

from rhino_jax.analysis.dim_classes import find_dim_classes
from rhino_jax.analysis.inline_regions import inline_regions
from rhino_jax.analysis.roles import find_roles
from rhino_jax.frontend.regions import all_equations
from rhino_jax.frontend.rules.shape import DimMove, move_of
from rhino_jax.frontend.trace import Traced
from rhino_jax.ir.axes import AxisEnd, crossings, ends_across, ends_of
from rhino_jax.ir.factor import FactorKind
from rhino_jax.ir.program import Op, Program
from rhino_jax.ir.traits import OpKind
from rhino_jax.ir.transform import (
    BLOCKS,
    JOINED,
    InterleavedOrder,
    Stored,
    Transform,
    as_text,
    chosen,
)
from rhino_jax.passes.interleaved.moves import (
    DimRef,
    Marks,
    pieces_in_blocks,
    regroup_of,
)
from rhino_jax.passes.microbatch.flow.evaluated import RECOMPUTED_KINDS
from rhino_jax.passes.program_pass import ChoiceLimits


_SUMS = frozenset({OpKind.CONTRACTION, OpKind.REDUCTION})
"""Kinds of ops that sum over dims."""

_FREE = RECOMPUTED_KINDS | _SUMS | {OpKind.LOOKUP, OpKind.SCATTER, OpKind.UPDATE}
"""Kinds of ops that depend only on the values of elements along a parallel dim.
Generators depend on their positions, kernels may, and convolutions group them."""


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
    links = (x for x in ops.links(op) if _major_of(x, marks) is not None)
    ends = [end for link in links for end in link]
    operands = {(e.operand, e.span.dim) for e in ends if e.operand is not None}
    results = {(e.result, e.span.dim) for e in ends if e.result is not None}
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


MAX_PARTS = 8
"""Maximum number of parts of a fused weight, as queries, keys and values, or a gate and
the gated values. A dim that is split into more stands for repeated objects (layers,
heads)."""


def split_inputs(closed: Any, program: Program, count: int) -> Stored:
    """Return the dims of inputs that are split into parts, in interleaved order.

    If the program returns updated state, only state is interleaved.

    Args:
      closed: a closed jaxpr.
      program: the program imported from it.
      count: number of blocks; dims with a part that it does not divide are left in
        logical order.
    """
    ops = DimOrders.of(closed, program)
    state = {o.state_of for o in program.outputs} - {None}
    slots = {
        e.value: i
        for i, e in enumerate(program.inputs)
        if not e.is_const and (not state or i in state)
    }
    found: dict[tuple[int, int], InterleavedOrder] = {}
    seen: set[DimRef] = set()
    for place, parts in _split_dims(ops):
        blocks = InterleavedOrder(parts, count)
        if place in seen or not blocks.is_whole:
            continue
        marks = reach(ops, {place: blocks})
        if marks is None:
            continue
        held = {
            (slots[p.value], p.dim): b for p, b in marks.items() if p.value in slots
        }
        if held and not seen & marks.keys():
            seen |= marks.keys()
            found |= held
    return found


def storage_choices(traced: Traced, limits: ChoiceLimits) -> Iterator[Transform]:
    """Yield storage of fused weights in some numbers of blocks, each once."""
    closed, program = traced.closed_jaxpr, traced.program
    found = (as_text(split_inputs(closed, program, count)) for count in limits.counts)
    for choice in dict.fromkeys(found):
        if choice:
            yield Transform(BLOCKS, 0, 0, choice)


def joined_batches(closed: Any, program: Program) -> dict[DimRef, InterleavedOrder]:
    """Return the dims that hold concatenated batches, as [cond; uncond] of guidance,
    with rows of all batches in turn; empty where there are none.

    Each device then has its rows of every batch, as where they were not concatenated:
    neither concatenating nor taking them apart again moves any. Batches that an input
    or output of the program holds concatenated stay as they are.

    Args:
      closed: a closed jaxpr.
      program: the program imported from it.
    """
    ops = DimOrders.of(closed, program)
    joins = [m for m in map(ops.move, program.ops) if m is not None and not m.is_split]
    joins = [m for m in joins if not m.dim and 1 < len(m.pieces) <= MAX_PARTS]
    if not joins:
        return {}
    graph = inline_regions(program)
    classes = find_dim_classes(graph)
    batch = find_roles(graph, classes).batch
    ends = {each.value for each in program.inputs}
    ends |= {each.value for each in program.outputs}
    found: dict[DimRef, InterleavedOrder] = {}
    for move in joins:
        ports = [graph.held.get(value) for value, _, _ in move.pieces]
        rows = [
            classes.results(graph.nodes[p.node], p.result)[0] in batch
            for p in ports
            if p is not None
        ]
        parts = tuple(stop - start for _, start, stop in move.pieces)
        if len(rows) < len(parts) or not all(rows):
            continue
        marks = reach(
            ops, {DimRef(move.whole, 0): InterleavedOrder(parts, math.gcd(*parts))}
        )
        if marks and ends.isdisjoint(place.value for place in marks):
            if not found.keys() & marks.keys():
                found |= marks
    return found


def batch_choices(traced: Traced, limits: ChoiceLimits) -> Iterator[Transform]:
    """Yield the pass that interleaves concatenated batches, where there are any."""
    if joined_batches(traced.closed_jaxpr, traced.program):
        yield chosen(JOINED, {})


def _split_dims(ops: DimOrders) -> Iterator[tuple[DimRef, tuple[int, ...]]]:
    """Yield dims that are read in parts, and sizes of the parts."""
    bounds: dict[DimRef, set[int]] = defaultdict(set)
    for op in ops.program.ops:
        move = ops.move(op)
        if move is not None and move.is_split:
            cuts = {bound for _, *ends in move.pieces for bound in ends}
            bounds[DimRef(move.whole, move.dim)] |= cuts
        yield from _taken_apart(ops, op)
    for place, cuts in bounds.items():
        size = ops.program.values[place.value].shape[place.dim]
        parts = tuple(b - a for a, b in pairwise(sorted(cuts | {0, size})))
        if len(parts) <= MAX_PARTS:
            yield place, parts


def _taken_apart(ops: DimOrders, op: Op) -> Iterator[tuple[DimRef, tuple[int, ...]]]:
    """Yield dims that a reshape splits into parts, if ops then read single parts."""
    if op.name != "reshape" or op.rule is None or len(op.operands) != 1:
        return
    (layout,), (made,) = op.rule.operands, op.rule.results
    sizes = [factor.size for factor in op.rule.factors]
    for d, dim in enumerate(layout):
        is_few = len(dim) > 1 and 1 < sizes[dim[0]] <= MAX_PARTS
        if not is_few or (dim[0],) not in made:
            continue
        if _is_read_in_parts(ops, DimRef(op.results[0], made.index((dim[0],)))):
            whole = ops.program.values[op.operands[0]].shape[d]
            parts = (whole // sizes[dim[0]],) * sizes[dim[0]]
            yield DimRef(op.operands[0], d), parts


def _is_read_in_parts(ops: DimOrders, place: DimRef) -> bool:
    """Whether an op reads only some elements of a dim, possibly after transposes."""
    for op in ops.at[place.value]:
        if op.rule is None or op.operands[:1] != (place.value,):
            continue
        dim = op.rule.operands[0][place.dim]
        if any(op.rule.factors[f].kind is FactorKind.WHOLE for f in dim):
            return True
        if op.name == "transpose":
            moved = DimRef(op.results[0], op.rule.results[0].index(dim))
            if _is_read_in_parts(ops, moved):
                return True
    return False
