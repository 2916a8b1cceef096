"""Values of which micro-batches compute slices: positions, random bits, broadcasts.

They are complete in the program, but a slice of them needs no slicing of an operand.
"""

from __future__ import annotations

from collections.abc import Iterator

from rhino_jax.frontend.registry import part_of
from rhino_jax.ir.axes import AxisSpan, FactorSpan, locate, place
from rhino_jax.ir.factor import FactorKind, Rule
from rhino_jax.ir.traits import OpKind
from rhino_jax.rewrite.flat import FlatOp, FlatProgram


RECOMPUTED_KINDS = frozenset(
    {
        OpKind.ELEMENTWISE,
        OpKind.EXPONENTIAL,
        OpKind.CONVERSION,
        OpKind.IDENTITY,
        OpKind.BROADCAST,
        OpKind.MOVEMENT,
    }
)
"""Kinds of ops that are recomputed for each micro-batch, rather than sliced."""


def spot_of(item: FlatOp, value: int, span: AxisSpan) -> FactorSpan | None:
    """Return the position of the batch in an op's factors, given one of its results.

    Args:
      item: the op.
      value: id of the result.
      span: the dim of it that holds the batch.
    Returns:
      None where the op cannot compute the rows of a micro-batch alone.
    """
    rule = item.op.rule
    if rule is None or item.regions:
        return None
    layout = rule.results[item.results.index(value)]
    spot = locate(rule, layout, span)
    if spot is None or rule.factors[spot.factor].kind is not FactorKind.PARALLEL:
        return None
    return spot


def operands_cut(
    item: FlatOp, spot: FactorSpan
) -> Iterator[tuple[int, AxisSpan | None]]:
    """Yield each operand of an op with the dim that holds the batch, or None."""
    rule: Rule | None = item.op.rule
    assert rule is not None
    for value, layout in zip(item.operands, rule.operands, strict=True):
        yield value, place(rule, layout, spot)


Leaves = dict[tuple[int, AxisSpan], frozenset[int] | None]
"""(value id, the dim that holds the batch) → see `leaves_of`."""


def leaves_of(
    flat: FlatProgram, value: int, span: AxisSpan, found: Leaves
) -> frozenset[int] | None:
    """Return the values that a slice of a complete value is computed from.

    Args:
      flat: the program.
      value: id of the complete value.
      span: the dim of it that holds the batch.
      found: cache of results; filled by this.
    Returns:
      Ids of the values, needed in full; None where the value itself has to be sliced.
    """
    key = value, span
    if key not in found:
        found[key] = _leaves(flat, value, span, found)
    return found[key]


def _leaves(
    flat: FlatProgram, value: int, span: AxisSpan, found: Leaves
) -> frozenset[int] | None:
    if value not in flat.maker:
        return None
    item = flat.maker[value]
    spot = spot_of(item, value, span)
    if spot is None:
        return None
    if part_of(item.eqn) is not None:
        return frozenset(item.operands)
    if item.op.traits.kind not in RECOMPUTED_KINDS or len(item.results) != 1:
        return None
    leaves: set[int] = set()
    for operand, cut in operands_cut(item, spot):
        more = {operand} if cut is None else leaves_of(flat, operand, cut, found)
        if more is None:
            return None
        leaves |= more
    return frozenset(leaves)
