"""Slicing of one op, given operands that are whole, sliced by rows, or token pairs.

Token pairs are attention scores, weights, and sums of them: see `on_pairs`.

The sequence is one factor of S indices. Slices run in order in the forward pass, last
to first in the backward pass. At slice t a sliced value holds rows of that slice; pairs
of tokens (attention scores) hold its rows, and the columns up to its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any

import numpy as np

from rhino_jax.frontend.rules.shape import starts_of
from rhino_jax.ir.axes import AxisSpan, FactorSpan, locate, place
from rhino_jax.ir.factor import FactorKind, Layout, Rule
from rhino_jax.ir.program import Op
from rhino_jax.ir.traits import OpKind
from rhino_jax.passes.sequence_slices.masks import (
    AT_ZERO,
    LOW,
    MODERATE,
    SAME,
    Bounds,
    of_pairs,
    uniform,
)
from rhino_jax.utils.union_find import DisjointSets


class When(IntEnum):
    """Time from which a value is known in full.

    FORWARD: before the forward pass. BACKWARD: before the backward pass. END: after it.
    """

    FORWARD = 0
    BACKWARD = 1
    END = 2


@dataclass(frozen=True, slots=True)
class Cause:
    """The op for which a value needs all slices.

    Attributes:
      op: its id.
      why: in words, after its name.
    """

    op: int
    why: str


@dataclass(frozen=True, slots=True)
class WholeSequence:
    """State of a value that is known in full, at once.

    Attributes:
      when: before which pass it is known.
      is_free: whether it depends on data and constants alone.
      span: for a free value, the dim that seems to be the sequence; None: none.
      cause: for values known later, why.
    """

    when: When = When.FORWARD
    is_free: bool = False
    span: AxisSpan | None = None
    cause: Cause | None = None


@dataclass(frozen=True, slots=True)
class RowState:
    """State of a value of which a slice holds its rows.

    Attributes:
      span: the sequence dim.
      is_backward: whether the backward pass computes it.
      may_be_extreme: whether it may contain the values that masks add or subtract.
    """

    span: AxisSpan
    is_backward: bool
    may_be_extreme: bool = field(default=False, compare=False)


@dataclass(frozen=True, slots=True)
class PairState:
    """State of pairs of tokens: a slice holds its rows, and the columns up to its end.

    Attributes:
      spans: dims of both tokens.
      tokens: ids of these dims, see `flow.RowDims`.
      bounds: of its elements, by place.
      is_backward: whether the backward pass computes it.
    """

    spans: tuple[AxisSpan, AxisSpan]
    tokens: tuple[int, int]
    bounds: Bounds
    is_backward: bool


State = WholeSequence | RowState | PairState


@dataclass(frozen=True, slots=True)
class SlicedOp:
    """An op that runs slice by slice.

    Attributes:
      ats: where it has rows, or both tokens of pairs; empty where it slices or pads
        rows.
      results: states of its results.
      is_backward: whether slices run last to first.
      tokens: for pairs, ids of both dims; see `RowDims`. None for rows.
      sums: how results of slices are combined, where they have no rows: "sum", ..; None
        where they have.
      is_chained: whether its first operand is the result of the slice before.
    """

    ats: tuple[FactorSpan, ...]
    results: tuple[State, ...]
    is_backward: bool
    tokens: tuple[int, int] | None = None
    sums: str | None = None
    is_chained: bool = False


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
        return SlicedOp((at,), rows, is_backward)
    factor = rule.factors[at.factor]
    is_chained = op.traits.kind is OpKind.SCATTER
    how = reducer_of(op)
    if any(spans) or not how or how != factor.reducer:
        return Stuck("needs all of the sequence")
    if is_chained and place(rule, rule.operands[0], at) is not None:
        return Stuck("writes tokens at places of the sequence")
    cause = Cause(op.id, f"takes a {how} over the sequence")
    made = WholeSequence(end_of(is_backward), cause=cause)
    results = (made,) * len(spans)
    return SlicedOp((at,), results, is_backward, None, how, is_chained)


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
    starts = starts_of(op.name, eqn.params)
    start = starts[d] if starts else None
    if start is None:
        return None
    size, first = eqn.outvars[0].aval.shape[d], span.first + start
    after = start + size - span.size
    is_outside = min(-start, after, first) < 0 or first + size > length
    if op.name == "pad" and is_outside:
        return None
    made = AxisSpan(d, size, first=first)
    return SlicedOp((), (RowState(made, is_backward),), is_backward)


UNMASKED = "lets tokens read later ones"


class RowDims:
    """Dims of token pairs that have the rows; those of pairs that are combined agree.

    Every op on pairs has an id for each of its two dims of tokens.
    """

    def __init__(self, ops: int) -> None:
        self._sets = DisjointSets(2 + 2 * ops)  # 0: all rows, 1: all columns

    def of(self, op: int) -> tuple[int, int]:
        """Return the ids of the dims of an op, by its position."""
        return 2 + 2 * op, 3 + 2 * op

    def join(self, tokens: Sequence[int], others: Sequence[int]) -> bool:
        """Make dims those of others. Whether rows stay apart from columns."""
        for token, other in zip(tokens, others, strict=True):
            self._sets.union(token, other)
        return self._sets.find(tokens[0]) != self._sets.find(tokens[1])

    def may_be(self, tokens: Sequence[int], row: int) -> bool:
        """Whether the first dim, or for `row` 1 the second, may have the rows."""
        at = [self._sets.find(token) for token in tokens]
        return at[row] != 1 and at[1 - row] != 0

    def decide(self, tokens: Sequence[int], row: int) -> bool:
        """Let a dim have the rows. Whether it may."""
        return self.join(tokens, (row, 1 - row))

    def row(self, tokens: Sequence[int]) -> int:
        """Return which dim has the rows; the first one where nothing depends on it."""
        row = 1 - self.may_be(tokens, 0)
        self.decide(tokens, row)
        return row

    def masked_row(
        self, tokens: Sequence[int], bounds: Bounds, kept: int | None = None
    ) -> int | None:
        """Return which dim has the rows, by where later columns are zero; None: they
        are not.

        Args:
          tokens: ids of both dims.
          bounds: of the pairs, by place.
          kept: the dim that is preferred, if any.
        """
        rows = [r for r in (0, 1) if bounds.is_zero[r] and self.may_be(tokens, r)]
        row = kept if kept in rows else next(iter(rows), None)
        if row is not None:
            self.decide(tokens, row)
        return row


TURNED = Stuck("turns rows and columns of pairs", is_refused=True)


def on_pairs(
    op: Op,
    eqn: Any,
    tokens: tuple[int, int],
    ats: tuple[FactorSpan, ...],
    is_backward: bool,
    rows: RowDims,
    states: Sequence[State],
    known: Sequence[Bounds | None],
) -> SlicedOp | Stuck:
    """Slice an op that has tokens at two places.

    Args:
      op, eqn: the op.
      tokens: ids of both dims of tokens.
      ats: both places.
      is_backward: whether it is in the backward pass.
      rows: which dims have the rows.
      states: of its operands.
      known: bounds of operands that are known before the forward pass.
    """
    rule, operands = op.rule, list[Bounds]()
    assert rule is not None
    for layout, var, state, bounds in zip(
        rule.operands, eqn.invars, states, known, strict=True
    ):
        if isinstance(state, PairState):
            first, _ = ats_in(rule, layout, state)
            is_turned = first == ats[1]
            own = state.tokens[::-1] if is_turned else state.tokens
            if not rows.join(tokens, own):
                return TURNED
            operands.append(state.bounds.turned() if is_turned else state.bounds)
        elif bounds is not None:
            operands.append(
                bounds.at_places([place(rule, layout, a) for a in ats], ats)
            )
        elif var.aval.dtype == np.bool_:
            every = np.broadcast_to(True, [at.size for at in ats])
            operands.append(replace(uniform(0, 1), mask=every))
        else:
            is_extreme = isinstance(state, RowState) and state.may_be_extreme
            most = np.inf if is_extreme else MODERATE
            operands.append(uniform(-most, most))
    made = of_pairs(op, eqn, operands, [bounds is not None for bounds in known])
    spans = [[place(rule, to, at) for at in ats] for to in rule.results]
    if len({tuple(span is None for span in of) for of in spans}) > 1:
        return Stuck("has results of several kinds", is_refused=True)
    if None in spans[0]:
        return _reduced(op, made, spans[0], tokens, ats, is_backward, rows)
    results = tuple(
        PairState((first, second), tokens, made, is_backward)
        for first, second in spans
        if first and second
    )
    return SlicedOp(ats, results, is_backward, tokens)


def _reduced(
    op: Op,
    made: Bounds,
    spans: Sequence[AxisSpan | None],
    tokens: tuple[int, int],
    ats: tuple[FactorSpan, ...],
    is_backward: bool,
    rows: RowDims,
) -> SlicedOp | Stuck:
    """Slice a reduction of pairs along their rows, columns or both."""
    how = reducer_of(op)
    if not how:
        return Stuck("needs all of the sequence", is_refused=True)
    kept, span = next(((k, s) for k, s in enumerate(spans) if s), (None, None))
    row, sums = None, None
    if how in ("sum", "or"):
        row = rows.masked_row(tokens, made, kept)
    elif how == "max" and kept is not None and made.high[kept] <= LOW:
        row = kept
        # Some column up to a row is surely not masked: itself or the first.
        is_same = (ats[0].first, ats[0].size) == (ats[1].first, ats[1].size)
        is_same = is_same and made.low[SAME] >= -MODERATE
        has_first = ats[1 - row].first == 0
        if not is_same and not (has_first and made.low[AT_ZERO + row] >= -MODERATE):
            why = "may find all columns of a row masked: it then reads later ones"
            return Stuck(why, is_refused=True)
        if not rows.decide(tokens, row):
            return TURNED
    if row is None:
        return Stuck(UNMASKED + made.leak(kept or 0), is_refused=True)
    result: State
    if span is None:
        cause = Cause(op.id, f"takes a {how} over the sequence")
        sums, result = how, WholeSequence(end_of(is_backward), cause=cause)
    else:
        sums, result = None if kept == row else how, RowState(span, is_backward)
    if sums and span and not is_backward:
        return Stuck("adds, for each token, what later ones make of it")
    return SlicedOp(ats, (result,), is_backward, tokens, sums)
