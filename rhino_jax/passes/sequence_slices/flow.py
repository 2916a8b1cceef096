"""Slicing of one op, given operands that are whole, or sliced along the sequence.

The sequence is one factor of S indices. Slices run in order in the forward pass, last
to first in the backward pass. At slice t a sliced value holds rows of that slice; pairs
of tokens (attention scores, weights, and sums of them) hold its rows, and the columns
up to its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum

import numpy as np

from rhino_jax.attention.masks import (
    AT_ZERO,
    LOW,
    MODERATE,
    MODEST,
    SAME,
    Bounds,
    of_pairs,
    uniform,
)
from rhino_jax.frontend.rules.shape import starts_of
from rhino_jax.ir.axes import AxisSpan, FactorSpan, locate, place
from rhino_jax.ir.factor import FactorKind, Layout, Rule
from rhino_jax.ir.program import Op
from rhino_jax.ir.traits import OpKind
from rhino_jax.rewrite.flat import FlatOp
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
class SlicedState:
    """State of a value of which a slice holds its rows; of pairs, those of its rows.

    Attributes:
      spans: the sequence dim; of pairs of tokens, the dims of both.
      is_backward: whether the backward pass computes it.
      op: position of the op that computes it.
      bounds: of its elements, by place.
    """

    spans: tuple[AxisSpan, ...]
    is_backward: bool
    op: int
    bounds: Bounds = field(default=MODEST, compare=False)

    @property
    def is_pairs(self) -> bool:
        return len(self.spans) == 2


State = WholeSequence | SlicedState


@dataclass(frozen=True, slots=True)
class SlicedOp:
    """An op that runs slice by slice.

    Attributes:
      ats: where it has rows, or both tokens of pairs; empty where it slices or pads
        rows.
      results: states of its results.
      is_backward: whether slices run last to first.
      sums: how results of slices are combined, where they have no rows: "sum", ..; None
        where they have.
      is_chained: whether its first operand is the result of the slice before.
    """

    ats: tuple[FactorSpan, ...]
    results: tuple[State, ...]
    is_backward: bool
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


NEEDS_ALL = "needs all of the sequence"

_COUPLED = {
    FactorKind.HALO: "slides a window over the sequence",
    FactorKind.INDEX: "looks up tokens of the sequence",
    FactorKind.MERGE: NEEDS_ALL,
    FactorKind.WHOLE: NEEDS_ALL,
}


def ats_in(rule: Rule, layout: Layout, state: State) -> list[FactorSpan | None]:
    """Return where an operand has tokens: none, rows, or both tokens of pairs."""
    spans = () if isinstance(state, WholeSequence) else state.spans
    return [locate(rule, layout, span) for span in spans]


class RowDims:
    """Dims of token pairs that have the rows; those of pairs that are combined agree.

    Ops on pairs are known by their positions, and have two dims of tokens.
    """

    def __init__(self, ops: int) -> None:
        self._sets = DisjointSets(2 + 2 * ops)  # 0: all rows, 1: all columns

    def join(self, op: int, other: int = -1, turn: int = 0) -> bool:
        """Make the dims of an op those of another one, in this order or, for `turn` 1,
        the other; by default its first one, or its second, has the rows. Whether rows
        stay apart from columns."""
        for k in (0, 1):
            self._sets.union(2 + 2 * op + k, 2 + 2 * other + (k ^ turn))
        first, second = self._ends(op)
        return first != second

    def _ends(self, op: int) -> tuple[int, int]:
        return self._sets.find(2 + 2 * op), self._sets.find(3 + 2 * op)

    def may_be(self, op: int, row: int) -> bool:
        """Whether the first dim, or for `row` 1 the second, may have the rows."""
        ends = self._ends(op)
        return ends[row] != 1 and ends[1 - row] != 0

    def row(self, op: int) -> int:
        """Return which dim has the rows; the first one where nothing depends on it."""
        row = 1 - self.may_be(op, 0)
        self.join(op, turn=row)
        return row

    def masked_row(self, op: int, bounds: Bounds, kept: int | None = None) -> int:
        """Return which dim has the rows, by where later columns are zero; -1: they are
        not.

        Args:
          op: the op.
          bounds: of the pairs, by place.
          kept: the dim that is preferred, if any.
        """
        rows = [r for r in (0, 1) if bounds.is_zero[r] and self.may_be(op, r)]
        row = kept if kept in rows else next(iter(rows), None)
        if row is None:
            return -1
        self.join(op, turn=row)
        return row


UNMASKED = "lets tokens read later ones"

TURNED = Stuck("turns rows and columns of pairs", is_refused=True)


def on_tokens(
    i: int,
    each: FlatOp,
    ats: Sequence[FactorSpan],
    is_backward: bool,
    rows: RowDims,
    states: Sequence[State],
    known: Sequence[Bounds | None],
) -> SlicedOp | Stuck:
    """Slice an op that has tokens at one place, or at two.

    Args:
      i, each: the op, and its position.
      ats: the places.
      is_backward: whether it is in the backward pass.
      rows: which dims of pairs have the rows.
      states: of its operands.
      known: bounds of operands that are known before the forward pass.
    """
    rule, is_pairs, made = each.rule, len(ats) > 1, MODEST
    if is_pairs:
        operands = list[Bounds]()
        pairs = zip(rule.operands, each.eqn.invars, states, known, strict=True)
        for layout, var, state, bounds in pairs:
            if isinstance(state, SlicedState):
                turn = state.is_pairs and ats_in(rule, layout, state)[0] == ats[1]
                if state.is_pairs and not rows.join(i, state.op, turn):
                    return TURNED
                bounds = state.bounds.turned() if turn else state.bounds
            elif bounds is not None:
                at = [place(rule, layout, a) for a in ats]
                bounds = bounds.at_places(at, ats)
            elif var.aval.dtype == np.bool_:
                every = np.broadcast_to(True, [a.size for a in ats])
                bounds = replace(uniform(0, 1), mask=every)
            operands.append(bounds or MODEST)
        made = of_pairs(each.op, each.eqn, operands, [b is not None for b in known])
    spans = [tuple(place(rule, to, a) for a in ats) for to in rule.results]
    placed = [tuple(s for s in of if s) for of in spans]
    if all(len(of) == len(ats) for of in placed):
        states = [SlicedState(of, is_backward, i, made) for of in placed]
        return SlicedOp(tuple(ats), tuple(states), is_backward)
    if len({*spans}) > 1:
        return Stuck(NEEDS_ALL, is_pairs)
    # A reduction: of rows; or of pairs along their rows, columns or both.
    traits, (span_of, *_) = each.op.traits, spans
    how = "sum" if traits.kind is OpKind.CONTRACTION else traits.reducer
    gone = [at for at, span in zip(ats, span_of, strict=True) if span is None]
    if not how or any(rule.factors[at.factor].reducer != how for at in gone):
        return Stuck(NEEDS_ALL, is_pairs)
    is_chained = traits.kind is OpKind.SCATTER
    if is_chained and any(place(rule, rule.operands[0], at) for at in gone):
        return Stuck("writes tokens at places of the sequence")
    kept, span = next(((k, s) for k, s in enumerate(span_of) if s), (None, None))
    row = 0
    if is_pairs and how in ("sum", "or"):
        row = rows.masked_row(i, made, kept)
    elif is_pairs:
        row = -1 if how != "max" or kept is None or made.high[kept] > LOW else kept
        if row >= 0:
            # Some column up to a row is surely not masked: itself or the first.
            is_same = len({(at.first, at.size) for at in ats}) == 1
            is_same &= made.low[SAME] >= -MODERATE
            has_first = ats[1 - row].first == 0
            if not is_same and not (has_first and made.low[AT_ZERO + row] >= -MODERATE):
                why = "may find all columns of a row masked: it then reads later ones"
                return Stuck(why, is_refused=True)
            if not rows.join(i, turn=row):
                return TURNED
    if row < 0:
        return Stuck(UNMASKED + made.leak(kept or 0), is_refused=True)
    sums = None if kept == row else how
    if sums and span and not is_backward:
        return Stuck("adds, for each token, what later ones make of it")
    cause = Cause(each.op.id, f"takes a {how} over the sequence")
    result: State = WholeSequence(end_of(is_backward), cause=cause)
    if span is not None:
        result = SlicedState((span,), is_backward, i)
    results = (result,) * len(spans)
    return SlicedOp(tuple(ats), results, is_backward, sums, is_chained)


def on_window(
    i: int, each: FlatOp, state: State, is_backward: bool, length: int
) -> SlicedOp | None:
    """Slice an op that drops the first or last rows, or pads them.

    Args:
      i, each: the op, and its position.
      state: of its first operand.
      is_backward: whether it is in the backward pass.
      length: of the sequence, in tokens.
    Returns:
      None where it is no such op.
    """
    if isinstance(state, WholeSequence) or state.is_pairs:
        return None
    (span,), name = state.spans, each.op.name
    starts = starts_of(name, each.eqn.params)
    start = starts[span.dim] if starts and span.is_plain else None
    if start is None:
        return None
    size, first = each.eqn.outvars[0].aval.shape[span.dim], span.first + start
    is_outside = start > 0 or size + start < span.size or first < 0
    if name == "pad" and (is_outside or first + size > length):
        return None
    made = AxisSpan(span.dim, size, first=first)
    return SlicedOp((), (SlicedState((made,), is_backward, i),), is_backward)
