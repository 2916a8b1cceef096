"""Decisions in terms of the IR: a spec for every value and every use of a value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rhino_jax.hardware.lowering import AS_WRITTEN, LoweringPolicy
from rhino_jax.ir.program import Op
from rhino_jax.ir.spec import Spec


@dataclass(frozen=True, slots=True)
class Decisions:
    """The specs of a program's values.

    A value without an entry is left to the compiler (scalars, literals). Inside a
    region, value ids are those of the region. Inputs of CALL and COND regions have the
    specs in which the op reads its operands (see `operands`).

    Attributes:
      values: value id → spec of the value after the op that makes it (and after any
        reduction of partial sums); for loop-region inputs, the spec inside the loop.
      operands: (op id, operand position) → spec in which the op reads the operand, only
        where it differs from the value's spec. For a loop op the operand has its outer
        (stacked) shape.
      region_outputs: (op id, region position, output position) → spec in which a value
        leaves a region, only where it differs from the value's spec.
      outputs: one spec per program output.
      waypoints: value id → specs that its partial sums pass through before they reach
        the spec in `values`, one after each reduce-scatter but the last.
      through: (op id, operand position) → specs that the operand passes through on its
        way to its spec in `operands`; each copy is computed once for all readers that
        share it.
      lowering: how the compiler lowers shardings: it determines the specs that
        resharded values pass through.
    """

    values: Mapping[int, Spec] = field(default_factory=dict)
    operands: Mapping[tuple[int, int], Spec] = field(default_factory=dict)
    region_outputs: Mapping[tuple[int, int, int], Spec] = field(default_factory=dict)
    outputs: tuple[Spec, ...] = ()
    waypoints: Mapping[int, tuple[Spec, ...]] = field(default_factory=dict)
    through: Mapping[tuple[int, int], tuple[Spec, ...]] = field(default_factory=dict)
    lowering: LoweringPolicy = AS_WRITTEN


def held_specs(op: Op, decisions: Decisions) -> list[Spec | None]:
    """Return the specs in which an op reads its operands, then those of its results."""
    values, operands = decisions.values, decisions.operands
    read = enumerate(op.operands)
    return [
        *(operands.get((op.id, i), values.get(v)) for i, v in read),
        *(values.get(v) for v in op.results),
    ]
