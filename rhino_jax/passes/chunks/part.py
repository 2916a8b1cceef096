"""Ops on the logits of one output projection, and the dims to chunk."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from rhino_jax.ir.axes import AxisSpan, follow
from rhino_jax.ir.factor import Layout
from rhino_jax.ir.program import Value
from rhino_jax.passes.chunks.heads import Head
from rhino_jax.passes.microbatch.flow.states import DimPart
from rhino_jax.rewrite.flat import FlatOp, FlatProgram


Place = tuple[AxisSpan | None, AxisSpan | None]
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
    walk = _ChunkWalk(flat, head)
    while True:
        before = len(walk.makers)
        ops = walk.forward()
        if any(walk.is_foreign(item) for item in walk.ops if item.op.id in ops):
            return None
        walk.backward(ops)
        if len(walk.makers) == before:
            return DimPart(frozenset(ops | walk.makers), walk.seeds)


@dataclass(slots=True)
class _ChunkWalk:
    """A walk from an output projection to the ops on its logits.

    Attributes:
      flat: the program.
      head: the output projection.
      long: id of each value with full tokens and vocabulary → its dims that are these.
      makers: ids of ops that compute values as large as the logits from other operands.
      seeds: op id → operand position → dim to chunk, of operands known in full.
    """

    flat: FlatProgram
    head: Head
    long: dict[int, Place] = field(default_factory=dict)
    makers: set[int] = field(default_factory=set)
    seeds: dict[int, dict[int, AxisSpan]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        head = self.head.item
        self.seeds[head.op.id] = {self.head.tokens: self.head.cut}
        self.long[head.results[0]] = self.head.made, self.head.row

    @property
    def ops(self) -> tuple[FlatOp, ...]:
        """The ops of the program's top level."""
        return self.flat.top.ops

    def forward(self) -> set[int]:
        """Return ids of the ops that read or compute logits, or lie between those."""
        after = set(self.long)
        later: list[FlatOp] = []
        for item in self.ops:
            if after.isdisjoint(item.operands):
                continue
            after.update(item.results)
            later.append(item)
            self._follow(item)
        ops, wanted = {self.head.item.op.id}, set[int]()
        for item in reversed(later):
            is_long = not self.long.keys().isdisjoint(item.operands)
            if is_long or not wanted.isdisjoint(item.results):
                ops.add(item.op.id)
                wanted |= after.intersection(item.operands)
        return ops

    def _follow(self, item: FlatOp) -> None:
        """Record the results of an op that have logits' dims as its operands have."""
        rule = item.op.rule
        if rule is None or item.regions:
            return
        for i, value in enumerate(item.operands):
            if value not in self.long:
                continue
            place = self.long[value]
            for made, layout in zip(item.results, rule.results, strict=True):
                found = self._moved(item, rule.operands[i], place, layout)
                if None not in found:
                    self.long.setdefault(made, found)

    def _moved(self, item: FlatOp, at: Layout, place: Place, to: Layout) -> Place:
        """Map dims of one operand or result of an op to another.

        Args:
          item: the op.
          at: factors of each dim of the operand or result with the dims.
          place: dims of the tokens and the vocabulary in it.
          to: factors of each dim of the other operand or result.
        Returns:
          Dims of the tokens and the vocabulary in the other one.
        """
        rule = item.op.rule
        assert rule is not None
        tokens, row = (None if s is None else follow(rule, at, s, to) for s in place)
        return tokens, row

    def is_foreign(self, item: FlatOp) -> bool:
        """Whether an op cannot run among ops on logits.

        It has regions, or it is a contraction of other values.
        """
        is_long = not self.long.keys().isdisjoint(item.operands)
        is_head = item is self.head.item
        is_costly = item.op.traits.is_contraction and not (is_long or is_head)
        return bool(item.regions) or is_costly

    def backward(self, ops: set[int]) -> None:
        """Find ops that compute values as large as logits otherwise: one-hot labels."""
        for item in self.ops:
            rule = item.op.rule
            at = next((i for i, v in enumerate(item.operands) if v in self.long), None)
            if item.op.id not in ops or at is None or rule is None:
                continue
            place = self.long[item.operands[at]]
            for value, layout in zip(item.operands, rule.operands, strict=True):
                found = self._moved(item, rule.operands[at], place, layout)
                if None not in found and value not in self.long:
                    self._include(value, found)

    def _include(self, value: int, place: Place) -> None:
        """Include the op that computes a value if the value is as large as the logits.

        Its operands are included recursively. Ops without an operand to chunk are not
        included.
        """
        values, item = self.flat.program.values, self.flat.maker.get(value)
        least = size_of(values[self.head.item.results[0]])
        if item is None or item.op.rule is None or item.regions:
            return
        if value in self.long or size_of(values[value]) < least:
            return
        rule = item.op.rule
        layout = rule.results[item.results.index(value)]
        places = [self._moved(item, layout, place, d) for d in rule.operands]
        cuts = {i: p[0] for i, p in enumerate(places) if p[0] is not None}
        if not cuts or item.op.traits.is_contraction:
            return  # a broadcast, which each chunk computes itself; or another matmul
        self.long[value] = place
        self.makers.add(item.op.id)
        self.seeds[item.op.id] = cuts
        for operand, there in zip(item.operands, places, strict=True):
            if None not in there:
                self._include(operand, there)
