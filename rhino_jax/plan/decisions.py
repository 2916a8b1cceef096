"""What was decided, in the terms of the IR: a spec for every value and use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rhino_jax.hardware.lowering import AS_WRITTEN, LoweringPolicy
from rhino_jax.ir.program import Op
from rhino_jax.ir.spec import Spec


@dataclass(frozen=True, slots=True)
class Decisions:
    """The specs of a program's values.

    A value that no entry mentions is left to the compiler (scalars, literals).
    Inside a region, value ids are those of the region. CALL and COND regions'
    inputs are held as the op's operands are read (see `operands`).

    Attributes:
      values: value id → spec in which the value is held after it is made (after
        any reduction); for loop-region inputs, the spec inside the loop.
      operands: (op id, operand position) → spec in which the op reads the
        operand, given only where it is not how the value is held. For a loop op
        the operand has its outer (stacked) shape.
      region_outputs: (op id, region position, output position) → spec in which a
        value leaves a region, only where it is not how the value is held.
      outputs: one spec per program output.
      waypoints: value id → specs that its partial sums pass through before it is held
        as `values` says, one after each reduce-scatter but the last.
      through: (op id, operand position) → specs that the operand passes through on its
        way to `operands`, each made once for all that read the value through it.
      lowering: which specs values pass through where they are resharded.
    """

    values: Mapping[int, Spec] = field(default_factory=dict)
    operands: Mapping[tuple[int, int], Spec] = field(default_factory=dict)
    region_outputs: Mapping[tuple[int, int, int], Spec] = field(default_factory=dict)
    outputs: tuple[Spec, ...] = ()
    waypoints: Mapping[int, tuple[Spec, ...]] = field(default_factory=dict)
    through: Mapping[tuple[int, int], tuple[Spec, ...]] = field(default_factory=dict)
    lowering: LoweringPolicy = AS_WRITTEN


def held_specs(op: Op, decisions: Decisions) -> list[Spec | None]:
    """Return how an op reads its operands, and then how its results are held."""
    values, operands = decisions.values, decisions.operands
    read = enumerate(op.operands)
    return [
        *(operands.get((op.id, i), values.get(v)) for i, v in read),
        *(values.get(v) for v in op.results),
    ]
