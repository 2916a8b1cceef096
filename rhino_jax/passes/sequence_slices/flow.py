"""Slicing of one op, given operands that are whole, sliced by rows, or token pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rhino_jax.ir.axes import AxisSpan, FactorSpan, locate, place
from rhino_jax.ir.factor import FactorKind, Layout, Rule
from rhino_jax.ir.program import Op
from rhino_jax.ir.traits import OpKind
from rhino_jax.passes.sequence_slices.states import (
    Cause,
    PairState,
    RowState,
    State,
    When,
    WholeSequence,
)


@dataclass(frozen=True, slots=True)
class SlicedOp:
    """An op that runs slice by slice.

    Attributes:
      ats: where it has rows, or both tokens of pairs; empty where it slices or pads
        rows.
      pair: for pairs, which of both are the rows; None for rows.
      results: states of its results.
      is_backward: whether slices run last to first.
      sums: how results of slices are combined, where they have no rows: "sum", ..; None
        where they have.
      is_chained: whether its first operand is the result of the slice before.
    """

    ats: tuple[FactorSpan, ...]
    pair: PairState | None
    results: tuple[State, ...]
    is_backward: bool
    sums: str | None = None
    is_chained: bool = False

    @property
    def row(self) -> FactorSpan | None:
        """The tokens of which a slice holds its own rows."""
        if self.pair is None:
            return self.ats[0]
        return None if self.pair.row is None else self.ats[self.pair.row]

    @property
    def column(self) -> FactorSpan | None:
        """The tokens of which a slice holds all up to its end."""
        if self.pair is None or self.pair.row is None:
            return None
        return self.ats[1 - self.pair.row]


@dataclass(frozen=True, slots=True)
class Stuck:
    """The reason for which an op does not run slice by slice.

    Attributes:
      why: in words, as "sorts the sequence".
      is_refused: whether it cannot run on the whole sequence either.
    """

    why: str
    is_refused: bool = False


def end_of(is_backward: bool) -> When:
    """Return when results of all slices of a pass are known."""
    return When.END if is_backward else When.BACKWARD


def ats_of(op: Op, states: Sequence[State]) -> tuple[FactorSpan, ...] | Stuck:
    """Return where an op has the tokens of its operands, without duplicates.

    Args:
      op: the op.
      states: of its operands.
    Returns:
      One place, for rows, or two, for pairs; or why it cannot be sliced.
    """
    rule = op.rule
    if rule is None or op.manual is not None or op.traits.kind is OpKind.KERNEL:
        return Stuck("is not looked into")
    found: dict[FactorSpan, None] = {}
    for layout, state in zip(rule.operands, states, strict=True):
        for at in ats_in(rule, layout, state):
            if at is None:
                return Stuck("has the sequence in a part of a dim")
            kind = rule.factors[at.factor].kind
            if kind not in (FactorKind.PARALLEL, FactorKind.REDUCE):
                return Stuck(_COUPLED[kind])
            found[at] = None
    if len({at.factor for at in found}) < len(found):
        return Stuck("compares tokens with those of other places")
    if len(found) > 2:
        return Stuck("has the sequence in three of its dims")
    return tuple(found)


_COUPLED = {
    FactorKind.HALO: "slides a window over the sequence",
    FactorKind.INDEX: "looks up tokens of the sequence",
    FactorKind.MERGE: "needs all of the sequence",
    FactorKind.WHOLE: "needs all of the sequence",
}


def ats_in(rule: Rule, layout: Layout, state: State) -> list[FactorSpan | None]:
    """Return where an operand has tokens: none, rows, or both tokens of pairs."""
    if isinstance(state, WholeSequence):
        return []
    spans = (state.span,) if isinstance(state, RowState) else state.spans
    return [locate(rule, layout, span) for span in spans]


def on_rows(op: Op, at: FactorSpan, is_backward: bool) -> SlicedOp | Stuck:
    """Slice an op whose operands have rows at one place.

    Args:
      op: the op.
      at: the place.
      is_backward: whether it is in the backward pass.
    """
    rule = op.rule
    assert rule is not None
    spans = [place(rule, layout, at) for layout in rule.results]
    if all(span is not None for span in spans):
        rows = tuple(RowState(span, is_backward) for span in spans if span is not None)
        return SlicedOp((at,), None, rows, is_backward)
    factor = rule.factors[at.factor]
    is_chained = op.traits.kind is OpKind.SCATTER
    how = reducer_of(op)
    if any(spans) or not how or how != factor.reducer:
        return Stuck("needs all of the sequence")
    if is_chained and place(rule, rule.operands[0], at) is not None:
        return Stuck("writes tokens at places of the sequence")
    cause = Cause(op.id, f"takes a {how} over the sequence")
    made = WholeSequence(end_of(is_backward), cause=cause)
    return SlicedOp((at,), None, (made,) * len(spans), is_backward, how, is_chained)


def reducer_of(op: Op) -> str:
    """Return how an op combines elements, as "sum"; empty where it does not."""
    return "sum" if op.traits.kind is OpKind.CONTRACTION else op.traits.reducer


def on_window(
    op: Op, eqn: Any, state: State, is_backward: bool, length: int
) -> SlicedOp | None:
    """Slice an op that drops the first or last rows, or pads them.

    Args:
      op, eqn: the op.
      state: of its first operand.
      is_backward: whether it is in the backward pass.
      length: of the sequence, in tokens.
    Returns:
      None where it is no such op.
    """
    if not isinstance(state, RowState) or not state.span.is_plain:
        return None
    span, d = state.span, state.span.dim
    if op.name == "slice":
        strides = eqn.params["strides"]
        start, stop = eqn.params["start_indices"][d], eqn.params["limit_indices"][d]
        if strides is not None and strides[d] != 1:
            return None
        made = AxisSpan(d, stop - start, first=span.first + start)
    elif op.name == "pad":
        low, high, between = eqn.params["padding_config"][d]
        first, stop = span.first - low, span.first + span.size + high
        if between or min(low, high, first) < 0 or stop > length:
            return None
        made = AxisSpan(d, stop - first, first=first)
    else:
        return None
    return SlicedOp((), None, (RowState(made, is_backward),), is_backward)
