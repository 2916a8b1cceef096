"""Linear ops, which commute with sums, and ops that sum.

It holds up to rounding, as for any other order of addition.
"""

from __future__ import annotations

from rhino_jax.ir.program import Op, Program
from rhino_jax.ir.traits import FROM_ALL, OpKind


Ways = tuple[tuple[int, ...], ...]
"""Sets of positions of operands; all operands of one set may be unreduced."""

_FLOATS = ("float", "bfloat", "complex")


def linear_ways(program: Program, op: Op) -> Ways:
    """Return the sets of operands in which an op is jointly linear, if any.

    Convolutions and grouped matmuls are left out: over one more batch dim, they are
    other ops.
    """
    traits, values = op.traits, program.values
    if op.call is not None or len(op.results) != 1 or traits.states_placement:
        return ()
    if traits.kind is OpKind.CONVOLUTION or traits.masked:
        return ()
    if not values[op.results[0]].dtype.startswith(_FLOATS):
        return ()
    return tuple(
        group
        for group in traits.commutes_in(len(op.operands))
        if all(values[op.operands[i]].dtype.startswith(_FLOATS) for i in group)
    )


def needs_all(op: Op) -> bool:
    """Whether reduced operands would have to be padded with zeros if others are
    unreduced."""
    return op.traits.kind is OpKind.MOVEMENT and op.traits.moves == FROM_ALL


def sums(op: Op) -> bool:
    """Whether an op's own sums can be deferred."""
    if op.traits.kind in (OpKind.REDUCTION, OpKind.SCATTER):
        return op.traits.reducer == "sum"
    return op.traits.is_contraction and not op.traits.masked
