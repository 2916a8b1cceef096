"""Values of the backward pass that belong to a user's expression.

Reverse differentiation emits the transposed equations of an expression, which keep its
source location. Values that they read from elsewhere in the backward pass are the
cotangent of the expression's value; values that others read from them are contributions
to the cotangents of its operands. Equations that `jax.checkpoint` recomputes are
neither.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rhino_jax.ir.crossings import crossings
from rhino_jax.ir.program import Op, Program


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
