"""Analysis of a micro-batch: which values are sliced along the sequence, and where."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rhino_jax._compat import open_jaxpr
from rhino_jax.errors import TokenSliceError
from rhino_jax.ir.axes import AxisSpan, FactorSpan, follow, locate
from rhino_jax.ir.factor import FactorKind
from rhino_jax.ir.program import Op, Program
from rhino_jax.ir.traits import OpKind
from rhino_jax.passes.sequence_slices import refused
from rhino_jax.passes.sequence_slices.flow import (
    UNMASKED,
    Cause,
    PairState,
    RowDims,
    RowState,
    SlicedOp,
    State,
    Stuck,
    When,
    WholeSequence,
    ats_in,
    ats_of,
    end_of,
    on_pairs,
    on_rows,
    on_window,
)
from rhino_jax.passes.sequence_slices.masks import Bounds, adds
from rhino_jax.passes.sequence_slices.opened import (
    EqualValues,
    OpenedProgram,
    equal_values,
)
from rhino_jax.passes.staged.apart import Apart


def lengths_of(apart: Apart) -> list[int]:
    """Return candidates for the length of the sequence, likeliest first.

    Data have their sequence in a dim that is not their batch: tokens and labels of that
    length, or text that has one more token, of which a step takes both.
    """
    found: dict[int, int] = {}
    for i, aval in _data(apart):
        for k, d in enumerate(_dims(apart, i, aval.ndim)):
            # Tokens are integers; features come after the sequence.
            score = 2 * np.issubdtype(aval.dtype, np.integer) + (k == 0)
            size = aval.shape[d]
            found[size] = found.get(size, 0) + int(score)
    best = sorted((s for s in found if s > 1), key=lambda s: (-found[s], -s))
    return [*dict.fromkeys([*best, *(s - 1 for s in best if s > 2)])]


def shapes_of(apart: Apart) -> list[tuple[int, ...]]:
    """Return the shapes of the data, as a micro-batch reads them."""
    return [tuple(aval.shape) for _, aval in _data(apart)]


def _data(apart: Apart) -> Iterator[tuple[int, Any]]:
    """Yield position and type of the data among what enters a micro-batch."""
    avals = (v.aval for v in open_jaxpr(apart.piece).invars[1:])
    for i, (crossing, aval) in enumerate(zip(apart.entering, avals, strict=False)):
        if crossing.how == "sliced":
            yield i, aval


def _dims(apart: Apart, position: int, rank: int) -> Iterator[int]:
    """Yield the dims of an input but those of the batch.

    Args:
      apart: the step.
      position: of the input, which is [.., outer, rows, micro-batches, inner, ..].
      rank: of the input.
    """
    first = apart.entering[position].span.dim
    return (d for d in range(rank) if d not in (first + 1, first + 2))


@dataclass(slots=True)
class SliceAnalysis:
    """States of a micro-batch's values, and slicing of its equations.

    Attributes:
      piece: the micro-batch.
      equal: its equal values, and what is known of them.
      length: of the sequence, in tokens.
      rows: which dims of token pairs have the rows.
      states: for every value, by its id in the program.
      runs: for every equation how it runs slice by slice; None: once, on whole values.
      known: equations that recompute values that the forward pass produced in full.
    """

    piece: OpenedProgram
    equal: EqualValues
    length: int
    rows: RowDims
    states: dict[int, State]
    runs: list[SlicedOp | None] = field(default_factory=list)
    known: set[int] = field(default_factory=set)

    @property
    def program(self) -> Program:
        return self.piece.program

    def twin(self, value: int) -> State | None:
        """Return the state of an equal value of the forward pass, if any."""
        return self.states.get(self.equal.twins.get(value, -1))

    def walk(self) -> None:
        """Find the states of all values.

        Raises:
          TokenSliceError: a token needs later ones, or it cannot be proved that none
            does.
        """
        for i, each in enumerate(self.piece.ops):
            op, run = each.op, None
            literals = self.piece.flat.consts.keys() & {*op.operands}
            self.states.update(dict.fromkeys(literals, WholeSequence(is_free=True)))
            states = [self.states[v] for v in op.operands]
            twins = [self.twin(v) for v in op.results]
            made: Sequence[State]
            if twins and all(
                isinstance(s, WholeSequence) and s.when is When.BACKWARD for s in twins
            ):
                self.known.add(i)
                made = [s for s in twins if s is not None]
            else:
                found = self._run(i, states)
                if isinstance(found, SlicedOp):
                    run, made = found, self._results(op, found, states)
                else:
                    made = self._whole(i, states, found)
            self.runs.append(run)
            self.states.update(zip(op.results, made, strict=True))
        self._settle()

    def _refused(self, op: Op, why: str) -> TokenSliceError:
        return refused.not_causal(self.program, self.length, op, why)

    def _run(self, i: int, states: Sequence[State]) -> SlicedOp | Stuck | None:
        """Return how an equation runs slice by slice; None where no operand is
        sliced."""
        each, is_backward = self.piece.ops[i], self.piece.is_backward[i]
        op, ats = each.op, ats_of(each.op, states)
        if all(isinstance(s, WholeSequence) for s in states):
            at = _meeting(op, states)
            run = None if at is None else on_rows(op, at, is_backward)
            return run if isinstance(run, SlicedOp) and run.sums is None else None
        done: SlicedOp | Stuck
        if isinstance(ats, Stuck):
            done = ats
        elif len(ats) == 1:
            done = on_rows(op, ats[0], is_backward)
        else:
            known = [*map(self._bounds, op.operands)]
            of, rows = self.rows.of(i), self.rows
            done = on_pairs(op, each.eqn, of, ats, is_backward, rows, states, known)
        if isinstance(done, SlicedOp):
            return done
        window = on_window(op, each.eqn, states[0], is_backward, self.length)
        if window is not None:
            return window
        if done.is_refused:
            raise self._refused(op, done.why)
        if any(map(self._is_unmasked, states)):
            raise self._refused(op, f"{done.why}, and {UNMASKED}")
        return done

    def _is_unmasked(self, state: State) -> bool:
        """Whether a value is token pairs of which later ones may not be zero."""
        return (
            isinstance(state, PairState)
            and self.rows.masked_row(state.tokens, state.bounds) is None
        )

    def _bounds(self, value: int) -> Bounds | None:
        """Return what is known of a whole value; None: nothing, or it is sliced."""
        is_whole = isinstance(self.states[value], WholeSequence)
        return self.equal.of(value) if is_whole else None

    def _results(
        self, op: Op, run: SlicedOp, states: Sequence[State]
    ) -> Sequence[State]:
        """Return the states of results, rows that may be extreme marked as such.

        Raises:
          TokenSliceError: a slice reads what is known only after all slices.
        """
        traits, is_extreme = op.traits, False
        before = When.BACKWARD if run.is_backward else When.FORWARD
        for v, state in zip(op.operands, states, strict=True):
            if isinstance(state, WholeSequence) and state.when > before:
                assert state.cause is not None
                raise refused.late(self.program, self.length, state.cause, op)
            bounds = self._bounds(v)
            if bounds is not None:
                is_added = adds(traits) and bounds.high.dtype.kind == "f"
                is_extreme |= bool(bounds.is_extreme(is_added).any())
            is_extreme |= isinstance(state, RowState) and state.may_be_extreme
        # `reduce_max` runs only on pairs of which every row has a column that is seen.
        if traits.is_bounded or traits.limit is not None or traits.reducer == "max":
            return run.results
        return [
            replace(state, may_be_extreme=is_extreme)
            if isinstance(state, RowState)
            else state
            for state in run.results
        ]

    def _whole(
        self, i: int, states: Sequence[State], stuck: Stuck | None
    ) -> Sequence[State]:
        """Return the states of results of an op that runs once, on whole values."""
        op, eqn = self.piece.ops[i].op, self.piece.ops[i].eqn
        wholes = [s for s in states if isinstance(s, WholeSequence)]
        ends = [
            end_of(s.is_backward) for s in states if not isinstance(s, WholeSequence)
        ]
        when = max([*ends, *(s.when for s in wholes)], default=When.FORWARD)
        cause = next((s.cause for s in wholes if s.when is when), None)
        if stuck is not None:
            cause = Cause(op.id, stuck.why)
        if when is When.FORWARD:
            ids = op.operands, op.results
            self.equal.evaluate(
                eqn, *([self.equal.numbers[v] for v in of] for of in ids)
            )
        is_free = len(wholes) == len(states) and all(s.is_free for s in wholes)
        made = []
        for k, v in enumerate(op.results):
            bounds = self.equal.of(v)
            is_data = is_free and not (bounds and bounds.is_exact)
            span = self._place(op, wholes, k) if is_data else None
            made.append(WholeSequence(when, is_free, span, cause))
        return made

    def _place(
        self, op: Op, states: Sequence[WholeSequence], result: int
    ) -> AxisSpan | None:
        """Return the dim of a result of data alone that seems to be the sequence, or
        None.

        Such a value is known in full, so that slicing it along any dim is correct.
        """
        if op.rule is None:
            return None
        to = op.rule.results[result]
        spans = {
            follow(op.rule, layout, state.span, to)
            for layout, state in zip(op.rule.operands, states, strict=True)
            if state.span is not None
        } - {None}
        shape = self.program.values[op.results[result]].shape
        dims = [d for d, size in enumerate(shape) if size == self.length]
        if not spans and _is_resizing(self.program, op) and len(dims) == 1:
            return AxisSpan(dims[0], self.length)
        return spans.pop() if len(spans) == 1 else None

    def _settle(self) -> None:
        """Check what is known only at the end: which dim of pairs has the rows.

        Raises:
          TokenSliceError: the backward pass, which runs slices last to first, needs
            rows of earlier ones; or unmasked pairs are outputs of the micro-batch.
        """
        for v in self.program.body.outputs:
            if self._is_unmasked(self.states[v]):
                op = next(o for o in self.program.ops if v in o.results)
                raise self._refused(op, UNMASKED)
        for each, run in zip(self.piece.ops, self.runs, strict=True):
            if run is None or run.tokens is None:
                continue
            op, column = each.op, run.ats[1 - self.rows.row(run.tokens)]
            assert op.rule is not None
            for v, layout in zip(op.operands, op.rule.operands, strict=True):
                state, twin = self.states[v], self.twin(v)
                if not isinstance(state, RowState) or not state.is_backward:
                    continue
                is_same = isinstance(twin, RowState) and twin.span == state.span
                if ats_in(op.rule, layout, state) == [column] and not is_same:
                    why = "reads, of earlier slices, what the backward pass makes after"
                    raise self._refused(op, f"{why} it")


def _meeting(op: Op, states: Sequence[State]) -> FactorSpan | None:
    """Find where data meet weights along the sequence; slices begin there."""
    wholes = [s for s in states if isinstance(s, WholeSequence)]
    if op.rule is None or all(s.is_free for s in wholes):
        return None
    if any(s.when is not When.FORWARD for s in wholes):
        return None
    ats = {
        locate(op.rule, layout, state.span)
        for layout, state in zip(op.rule.operands, wholes, strict=True)
        if state.span is not None
    }
    at = ats.pop() if len(ats) == 1 else None
    if at is None or op.rule.factors[at.factor].kind is not FactorKind.PARALLEL:
        return None
    return at


def _is_resizing(program: Program, op: Op) -> bool:
    """Whether a dim of an op's result may be a longer or shorter one of its operand.

    So is text of which all but the last token is read, and all but the first predicted.
    """
    if op.traits.kind is OpKind.MOVEMENT:
        before, after = (program.values[v[0]].shape for v in (op.operands, op.results))
        return math.prod(before) != math.prod(after)
    return op.traits.kind is OpKind.LOOKUP


def fitting(
    apart: Apart, piece: OpenedProgram, lengths: Sequence[int]
) -> SliceAnalysis:
    """Return the analysis for the first length of the sequence that fits.

    Args:
      apart: the step.
      piece: its micro-batch, calls inlined.
      lengths: candidates, in tokens, likeliest first.
    Raises:
      TokenSliceError: none fits; with the reason for the likeliest.
    """
    if apart.early:
        raise refused.coupled(apart)
    equal, errors = equal_values(apart, piece), list[TokenSliceError]()
    for length in lengths:
        states = first_states(apart, piece, equal, length)
        found = SliceAnalysis(piece, equal, length, RowDims(len(piece.ops)), states)
        try:
            found.walk()
        except TokenSliceError as error:
            errors.append(error)
            continue
        if any(run is not None for run in found.runs):
            return found
    if errors:
        raise errors[0]
    raise refused.no_sequence(apart, shapes_of(apart))


def first_states(
    apart: Apart, piece: OpenedProgram, equal: EqualValues, length: int
) -> dict[int, State]:
    """Return states of the inputs of a micro-batch, by their ids in the program.

    Args:
      apart: the step.
      piece: its micro-batch, calls inlined.
      equal: its equal values.
      length: of the sequence, in tokens.
    """
    ids = piece.program.body.inputs
    states: dict[int, State] = dict.fromkeys(ids, WholeSequence(is_free=True))
    sequence = {
        i: [d for d in _dims(apart, i, aval.ndim) if aval.shape[d] == length]
        for i, aval in _data(apart)
    }
    for i, value in enumerate(ids[1 : 1 + len(apart.entering)]):
        bounds, dims = equal.of(value), sequence.get(i, [])
        states[value] = WholeSequence(
            is_free=1 + i not in piece.weights or bool(bounds and bounds.is_exact),
            span=AxisSpan(dims[0], length) if len(dims) == 1 else None,
        )
    return states
