"""Which values of the backward pass belong to an expression of the user's.

Reverse differentiation runs the equations of an expression again, transposed: they keep
its place. What they read from elsewhere that the backward pass made is the cotangent of
the expression's value; what they give to others is what the expression adds to the
cotangents of its operands. What `jax.checkpoint` computes again is neither.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rhino_jax.ir.program import Op, Program, RegionKind


Read = tuple[int, int, int]
"""A value, the op that reads it, and at which position."""


def is_transposed(op: Op) -> bool:
    """Whether an op is of the backward pass proper."""
    return op.source.is_backward and not op.source.is_recomputed


@dataclass(frozen=True)
class Cotangents:
    """The cotangents of a program.

    Attributes:
      maker: value → the op that makes it.
      readers: value → who reads it.
      entered: value that enters a region → the values outside, or of the round before,
        that it is.
    """

    maker: dict[int, Op]
    readers: dict[int, list[Read]]
    entered: dict[int, tuple[int, ...]]

    def is_one(self, value: int) -> bool:
        """Whether the backward pass made a value."""
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
        """Cotangents that some ops read from others."""
        members = list(ops)
        inside = {v for op in members for v in op.results}
        read = dict.fromkeys(v for op in members for v in op.operands)
        return [v for v in read if v not in inside and self.is_one(v)]

    def given_by(self, ops: Iterable[Op]) -> list[int]:
        """Values that some ops make for others."""
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
    """What is known of a program's backward pass."""
    found = Cotangents({}, {}, {})
    for op in program.ops:
        found.maker.update((v, op) for v in op.results)
        for i, v in enumerate(op.operands):
            found.readers.setdefault(v, []).append((v, op.id, i))
        if op.call is not None:
            found.entered.update(_entered(op))
    return found


def _entered(op: Op) -> dict[int, tuple[int, ...]]:
    """What enters an op's regions, by what it is outside."""
    assert op.call is not None
    call, found = op.call, dict[int, tuple[int, ...]]()
    if call.kind is RegionKind.COND:
        for region in call.regions:
            pairs = zip(region.inputs, op.operands[1:], strict=False)
            found.update((v, (outer,)) for v, outer in pairs)
    elif call.kind is RegionKind.WHILE:
        body = call.regions[1]
        outer = op.operands[call.num_cond_consts :]
        found.update((v, (o,)) for v, o in zip(body.inputs, outer, strict=False))
    else:
        (region,) = call.regions
        found.update(
            (v, (o,)) for v, o in zip(region.inputs, op.operands, strict=False)
        )
    if call.kind in (RegionKind.SCAN, RegionKind.WHILE):
        region = call.regions[-1]
        carries = region.inputs[call.num_consts : call.num_consts + call.num_carry]
        for v, after in zip(carries, region.outputs, strict=False):
            found[v] = (*found[v], after)
    return found
