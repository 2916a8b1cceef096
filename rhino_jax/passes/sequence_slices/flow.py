"""Slicing of one op, given operands that are whole, sliced by rows, or token pairs.

Token pairs are attention scores, weights, and sums of them: see `OnPairs`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rhino_jax.frontend.rules.shape import starts_of
from rhino_jax.ir.axes import AxisSpan, FactorSpan, locate, place
from rhino_jax.ir.factor import FactorKind, Layout, Rule
from rhino_jax.ir.program import Op
from rhino_jax.ir.traits import OpKind
from rhino_jax.passes.sequence_slices.bounds import MODERATE, Bounds
from rhino_jax.passes.sequence_slices.later import (
    Corner,
    PairOperand,
    corner_of,
    either,
    low,
    made_by,
)
from rhino_jax.passes.sequence_slices.states import (
    Cause,
    Cross,
    Fill,
    Later,
    PairState,
    RowState,
    Seen,
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
    return SlicedOp((), None, (RowState(made, is_backward),), is_backward)


UNMASKED = "lets tokens read later ones"


@dataclass(slots=True)
class Corners:
    """Cache of masks by row and column, and of op results on pairs.

    Attributes:
      found: (bounds, dims) → mask.
      made: (op, operands) → what is known of its results.
    """

    found: dict[Any, Corner | None] = field(default_factory=dict)
    made: dict[Any, Later] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class OnPairs:
    """An op that has tokens at two places.

    Attributes:
      op, eqn: the op.
      states: of its operands.
      ats: both places.
      is_backward: whether it is in the backward pass.
      corners: cache of masks by row and column.
    """

    op: Op
    eqn: Any
    states: Sequence[State]
    ats: tuple[FactorSpan, FactorSpan]
    is_backward: bool
    corners: Corners

    def done(self) -> SlicedOp | Stuck:
        pair = self._pair()
        if pair is None:
            return Stuck("turns rows and columns of pairs", is_refused=True)
        later = self._later(pair)
        assert self.op.rule is not None
        found = [
            [place(self.op.rule, layout, at) for at in self.ats]
            for layout in self.op.rule.results
        ]
        has = [[span is not None for span in spans] for spans in found]
        if len({*map(tuple, has)}) > 1:
            return Stuck("has results of several kinds", is_refused=True)
        if all(has[0]):
            made = tuple(
                Cross((first, second), pair, later, self.is_backward)
                for first, second in found
                if first is not None and second is not None
            )
            return SlicedOp(self.ats, pair, made, self.is_backward)
        return self._reduced(pair, later, found[0])

    def _pair(self) -> PairState | None:
        """Return which place has the rows by the operands; None where they differ."""
        pair = PairState()
        assert self.op.rule is not None
        for layout, state in zip(self.op.rule.operands, self.states, strict=True):
            if isinstance(state, Cross):
                first, _ = ats_in(self.op.rule, layout, state)
                if not pair.join(state.pair, turned=first == self.ats[1]):
                    return None
        return pair

    def _later(self, pair: PairState) -> Later:
        """Return facts about later columns; a mask decides which place has the rows."""
        if pair.row is not None:
            return self._made(pair.row)
        found: list[Later] = []
        for row in (0, 1):
            later = self._made(row)
            if later.fill is not Fill.ANY:
                pair.decide(row)
                return later
            found.append(later)
        return either(found)

    def _made(self, row: int) -> Later:
        parts = tuple(self._part(i, row) for i in range(len(self.states)))
        key = self.op.name, self.op.traits, parts
        if key not in self.corners.made:
            self.corners.made[key] = made_by(self.op, parts)
        return self.corners.made[key]

    def _part(self, i: int, row: int) -> PairOperand:
        state = self.states[i]
        if isinstance(state, Cross):
            # The operand's row dim is decided with this op's: later is unknown yet.
            return PairOperand(
                state.later
                if state.pair.row is not None
                else replace(state.later, fill=Fill.ANY)
            )
        if isinstance(state, RowState):
            extreme = state.may_be_extreme
            seen = Seen.NONE if extreme else Seen.ALL
            return PairOperand(
                Later(seen=seen, may_be_low=extreme, may_be_high=extreme)
            )
        if state.bounds is None:
            return PairOperand(Later())
        bounds = state.bounds
        least, most = bounds.least, bounds.most
        corner = self._corner(i, bounds, row)
        if corner is None:
            seen = Seen.ALL if least >= -MODERATE else Seen.NONE
            is_low = least < -MODERATE
            later = low(most, seen, may_be_low=is_low)
            if least == most == 0:
                later = Later(Fill.ZERO)
            return PairOperand(later, least, most)
        return PairOperand(corner.later, least, most, corner)

    def _corner(self, i: int, bounds: Bounds, row: int) -> Corner | None:
        assert self.op.rule is not None
        layout = self.op.rule.operands[i]
        ats = self.ats[row], self.ats[1 - row]
        spans = [place(self.op.rule, layout, at) for at in ats]
        if not all(span is None or span.is_plain for span in spans):
            return None
        if bounds.low.size == 1 == bounds.high.size and not self.op.traits.is_choice:
            return None
        first, second = (None if span is None else span.dim for span in spans)
        key = bounds, first, second, ats[0].first, ats[1].first, ats[0].size
        corners = self.corners.found
        if key not in corners:
            rows, columns = (AxisSpan(0, at.size, first=at.first) for at in ats)
            corners[key] = corner_of(bounds, (first, second), rows, columns)
        return corners[key]

    def _reduced(
        self, pair: PairState, later: Later, spans: Sequence[AxisSpan | None]
    ) -> SlicedOp | Stuck:
        """Slice a reduction of pairs along their rows, columns or both."""
        how, row = reducer_of(self.op), pair.row
        if row is None:
            return Stuck(_unmasked(later), is_refused=True)
        if not how:
            return Stuck("needs all of the sequence")
        kept = spans[row], spans[1 - row]
        is_zero = later.fill is Fill.ZERO and how in ("sum", "or")
        is_seen = later.fill is Fill.LOW and how == "max"
        if is_seen and later.seen is Seen.NONE:
            why = "may find all columns of a row masked: it then reads later ones"
            return Stuck(why, is_refused=True)
        made: State
        if kept[0] is not None:
            if not (is_zero or is_seen):
                return Stuck(_unmasked(later), is_refused=True)
            made = RowState(kept[0], self.is_backward)
            return SlicedOp(self.ats, pair, (made,), self.is_backward)
        if not is_zero:
            return Stuck(_unmasked(later), is_refused=True)
        if kept[1] is None:
            cause = Cause(self.op.id, f"takes a {how} over the sequence")
            made = WholeSequence(end_of(self.is_backward), cause=cause)
        elif self.is_backward:
            made = RowState(kept[1], True)
        else:
            return Stuck("adds, for each token, what later ones make of it")
        return SlicedOp(self.ats, pair, (made,), self.is_backward, how)


def _unmasked(later: Later) -> str:
    return UNMASKED + (f": {later.leak}" if later.leak else "")
