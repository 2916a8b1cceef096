"""Ops on the logits of one output projection, and the dims to chunk."""

from __future__ import annotations

import math

from rhino_jax.ir.axes import AxisSpan, follow
from rhino_jax.ir.program import Value
from rhino_jax.passes.chunks.heads import Head
from rhino_jax.passes.microbatch.flow.states import DimPart
from rhino_jax.rewrite.flat import FlatOp, FlatProgram


Place = tuple[AxisSpan | None, ...]
"""Dims of a value that are the tokens and the vocabulary; None where it lacks the
dim."""


def size_of(value: Value) -> int:
    """Return the number of elements of a value."""
    return math.prod(value.shape)


def part_of(flat: FlatProgram, head: Head) -> DimPart | None:
    """Return the ops to chunk with an output projection.

    Args:
      flat: the program.
      head: the output projection.
    Returns:
      None where they would include contractions or regions that do not work on logits.
    """
    (logits,), values = head.item.results, flat.program.values
    long: dict[int, Place] = {logits: (head.made, head.row)}
    seeds = {head.item.op.id: {head.tokens: head.cut}}

    def include(value: int, place: Place) -> None:
        """Include the op that computes a value as large as the logits, as one-hot
        labels, and its operands likewise, where it has operands to chunk."""
        item = flat.maker.get(value)
        is_small = size_of(values[value]) < size_of(values[logits])
        if item is None or None in place or value in long or is_small:
            return
        count = len(item.operands)
        places = _places(item, count + item.results.index(value), place)[:count]
        cuts = {i: p[0] for i, p in enumerate(places) if p[0] is not None}
        if not cuts or item.op.traits.is_contraction:
            return  # a broadcast, which each chunk computes itself; or another matmul
        long[value], seeds[item.op.id] = place, cuts
        for operand, there in zip(item.operands, places, strict=True):
            include(operand, there)

    before = 0
    while before < len(seeds):
        before, ops = len(seeds), _ops_on(flat, long) | seeds.keys()
        items = [item for item in flat.top.ops if item.op.id in ops]
        for item in items:
            is_other = long.keys().isdisjoint(item.operands) and item is not head.item
            if item.regions or (item.op.traits.is_contraction and is_other):
                return None
        for item in items:
            at = next((i for i, v in enumerate(item.operands) if v in long), None)
            if at is not None:
                places = _places(item, at, long[item.operands[at]])
                for value, place in zip(item.operands, places, strict=False):
                    include(value, place)
    return DimPart(frozenset(ops), seeds)


def _ops_on(flat: FlatProgram, long: dict[int, Place]) -> set[int]:
    """Return ids of the ops that read logits, or lie between such ops.

    Args:
      flat: the program.
      long: id of each value with full tokens and vocabulary → its dims that are these;
        results that have both are added.
    """
    after, later = set(long), list[FlatOp]()
    for item in flat.top.ops:
        if after.isdisjoint(item.operands):
            continue
        after.update(item.results)
        later.append(item)
        for i, value in enumerate(item.operands):
            if value in long:
                found = _places(item, i, long[value])[len(item.operands) :]
                for made, place in zip(item.results, found, strict=True):
                    if None not in place:
                        long.setdefault(made, place)
    ops, wanted = set[int](), set[int]()
    for item in reversed(later):
        is_long = not long.keys().isdisjoint(item.operands)
        if is_long or not wanted.isdisjoint(item.results):
            ops.add(item.op.id)
            wanted |= after.intersection(item.operands)
    return ops


def _places(item: FlatOp, at: int, place: Place) -> list[Place]:
    """Return the dims of tokens and vocabulary in an op's operands and results.

    Args:
      item: the op.
      at: position of an operand, or of a result after all operands.
      place: its dims that are these.
    """
    rule = item.op.rule
    if rule is None or item.regions:
        return [(None, None)] * (len(item.operands) + len(item.results))
    layouts = (*rule.operands, *rule.results)
    return [
        tuple(None if s is None else follow(rule, layouts[at], s, to) for s in place)
        for to in layouts
    ]
