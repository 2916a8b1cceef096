"""Analysis of a micro-batch: which values are sliced along the sequence, and where."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rhino_jax._compat import open_jaxpr
from rhino_jax.attention.masks import EXTREME, Bounds, adds
from rhino_jax.errors import TokenSliceError
from rhino_jax.ir.axes import AxisSpan, FactorSpan, follow, locate
from rhino_jax.ir.factor import FactorKind
from rhino_jax.ir.program import Op, Program
from rhino_jax.ir.traits import OpKind
from rhino_jax.passes.sequence_slices import refused
from rhino_jax.passes.sequence_slices.flow import (
    UNMASKED,
    Cause,
    RowDims,
    SlicedOp,
    SlicedState,
    State,
    Stuck,
    When,
    WholeSequence,
    ats_in,
    ats_of,
    end_of,
    on_tokens,
    on_window,
)
from rhino_jax.passes.sequence_slices.opened import OpenedProgram
from rhino_jax.passes.staged.apart import Apart


def data_of(apart: Apart) -> Iterator[tuple[int, Any, list[int]]]:
    """Yield the data among what enters a micro-batch: position, type, and the dims but
    those of the batch, as it is [.., outer, rows, micro-batches, inner, ..]."""
    avals = (v.aval for v in open_jaxpr(apart.piece).invars[1:])
    for i, (crossing, aval) in enumerate(zip(apart.entering, avals, strict=False)):
        if crossing.how == "sliced":
            rows = crossing.span.dim + 1
            yield i, aval, [d for d in range(aval.ndim) if d not in (rows, rows + 1)]


def lengths_of(apart: Apart) -> list[int]:
    """Return candidates for the length of the sequence, likeliest first.

    Data have their sequence in a dim that is not their batch: tokens and labels of that
    length, or text that has one more token, of which a step takes both.
    """
    found = Counter[int]()
    for _, aval, dims in data_of(apart):
        for k, d in enumerate(dims):
            # Tokens are integers; features come after the sequence.
            score = 2 * np.issubdtype(aval.dtype, np.integer) + (k == 0)
            found[aval.shape[d]] += int(score)
    best = sorted((s for s in found if s > 1), key=lambda s: (-found[s], -s))
    return [*dict.fromkeys([*best, *(s - 1 for s in best if s > 2)])]


@dataclass(slots=True)
class SliceAnalysis:
    """States of a micro-batch's values, and slicing of its equations.

    Attributes:
      piece: the micro-batch, calls inlined.
      length: of the sequence, in tokens.
      states: for every value, by its id in the program.
      rows: which dims of token pairs have the rows.
      runs: for every equation how it runs slice by slice; None: once, on whole values.
      known: equations that recompute values that the forward pass produced in full.
    """

    piece: OpenedProgram
    length: int
    states: dict[int, State]
    rows: RowDims = field(init=False)
    runs: list[SlicedOp | None] = field(default_factory=list)
    known: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        """Find the states of all values.

        Raises:
          TokenSliceError: a token needs later ones, or it cannot be proved that none
            does.
        """
        self.rows = RowDims(len(self.piece.ops))
        for i, each in enumerate(self.piece.ops):
            op, run = each.op, None
            states = [self.states[v] for v in op.operands]
            twins = [self.twin(v) for v in op.results]
            made: Sequence[State] = [
                s
                for s in twins
                if isinstance(s, WholeSequence) and s.when is When.BACKWARD
            ]
            if made and len(made) == len(twins):
                self.known.add(i)
            else:
                found = self._run(i, states)
                if isinstance(found, SlicedOp):
                    run, made = found, self._results(op, found, states)
                else:
                    made = self._whole(i, states, found)
            self.runs.append(run)
            self.states.update(zip(op.results, made, strict=True))
        self._settle()

    @property
    def program(self) -> Program:
        return self.piece.program

    def twin(self, value: int) -> State | None:
        """Return the state of an equal value of the forward pass, if any."""
        return self.states.get(self.piece.twins.get(value, -1))

    def _refused(self, op: Op, why: str, user: Op | None = None) -> TokenSliceError:
        return refused.not_causal(self.program, self.length, op, why, user)

    def _run(self, i: int, states: Sequence[State]) -> SlicedOp | Stuck | None:
        """Return how an equation runs slice by slice; None where no operand is
        sliced."""
        each, is_backward = self.piece.ops[i], self.piece.is_backward[i]
        op, ats = each.op, ats_of(each.op, states)
        known = [*map(self._bounds, op.operands)]
        of = is_backward, self.rows, states, known
        if all(isinstance(s, WholeSequence) for s in states):
            at = _meeting(op, states)
            run = None if at is None else on_tokens(i, each, [at], *of)
            return run if isinstance(run, SlicedOp) and run.sums is None else None
        done = ats if isinstance(ats, Stuck) else on_tokens(i, each, ats, *of)
        if isinstance(done, SlicedOp):
            return done
        window = on_window(i, each, states[0], is_backward, self.length)
        if window is not None:
            return window
        if done.is_refused:
            raise self._refused(op, done.why)
        if any(map(self._is_unmasked, states)):
            raise self._refused(op, f"{done.why}, and {UNMASKED}")
        return done

    def _is_unmasked(self, state: State) -> bool:
        """Whether a value is token pairs of which later ones may not be zero."""
        if isinstance(state, WholeSequence) or not state.is_pairs:
            return False
        return self.rows.masked_row(state.op, state.bounds) < 0

    def _bounds(self, value: int) -> Bounds | None:
        """Return what is known of a whole value; None: nothing, or it is sliced."""
        is_whole = isinstance(self.states[value], WholeSequence)
        return self.piece.bounds_of(value) if is_whole else None

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
            if isinstance(state, SlicedState):
                is_extreme |= state.bounds is EXTREME
                continue
            if state.when > before:
                assert state.cause is not None
                maker = self.program.ops[state.cause.op]
                raise self._refused(maker, state.cause.why, op)
            if (bounds := self._bounds(v)) is not None:
                is_added = adds(traits) and bounds.high.dtype.kind == "f"
                is_extreme |= bool(bounds.is_extreme(is_added).any())
        # `reduce_max` runs only on pairs of which every row has a column that is seen.
        is_modest = traits.is_bounded or traits.limit is not None
        if not is_extreme or is_modest or traits.reducer == "max":
            return run.results
        return [
            state
            if isinstance(state, WholeSequence) or state.is_pairs
            else replace(state, bounds=EXTREME)
            for state in run.results
        ]

    def _whole(
        self, i: int, states: Sequence[State], stuck: Stuck | None
    ) -> Sequence[State]:
        """Return the states of results of an op that runs once, on whole values."""
        op, each = self.piece.ops[i].op, self.piece.ops[i]
        wholes = [s for s in states if isinstance(s, WholeSequence)]
        ends = [end_of(s.is_backward) for s in states if isinstance(s, SlicedState)]
        when = max([*ends, *(s.when for s in wholes)], default=When.FORWARD)
        cause = next((s.cause for s in wholes if s.when is when), None)
        if stuck is not None:
            cause = Cause(op.id, stuck.why)
        if when is When.FORWARD:
            self.piece.evaluate(each, self.piece.numbers.__getitem__)
        is_free = not ends and all(s.is_free for s in wholes)
        made = []
        for k, v in enumerate(op.results):
            bounds = self.piece.bounds_of(v)
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
        for i, (each, run) in enumerate(zip(self.piece.ops, self.runs, strict=True)):
            if run is None or len(run.ats) < 2:
                continue
            column = run.ats[1 - self.rows.row(i)]
            for v, layout in zip(each.operands, each.rule.operands, strict=True):
                state, twin = self.states[v], self.twin(v)
                if isinstance(state, WholeSequence) or not state.is_backward:
                    continue
                is_same = isinstance(twin, SlicedState) and twin.spans == state.spans
                if ats_in(each.rule, layout, state) == [column] and not is_same:
                    why = "reads, of earlier slices, what the backward pass makes after"
                    raise self._refused(each.op, f"{why} it")


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
    if apart.early and lengths:
        raise refused.coupled(apart)
    errors = list[TokenSliceError]()
    for length in lengths:
        try:
            found = SliceAnalysis(piece, length, first_states(apart, piece, length))
        except TokenSliceError as error:
            errors.append(error)
            continue
        if any(run is not None for run in found.runs):
            return found
    shapes = [tuple(aval.shape) for _, aval, _ in data_of(apart)]
    raise next(iter(errors), refused.no_sequence(apart, shapes))


def first_states(apart: Apart, piece: OpenedProgram, length: int) -> dict[int, State]:
    """Return states of the inputs and constants of a micro-batch, by their ids.

    Args:
      apart: the step.
      piece: its micro-batch, calls inlined.
      length: of the sequence, in tokens.
    """
    ids = piece.program.body.inputs
    free: State = WholeSequence(is_free=True)
    states = dict.fromkeys([*ids, *piece.flat.consts], free)
    dims_of = {i: (aval, dims) for i, aval, dims in data_of(apart)}
    for i, value in enumerate(ids[1 : 1 + len(apart.entering)]):
        bounds, (aval, own) = piece.bounds_of(value), dims_of.get(i, (None, []))
        dims = [d for d in own if aval.shape[d] == length]
        states[value] = WholeSequence(
            is_free=1 + i not in piece.weights or bool(bounds and bounds.is_exact),
            span=AxisSpan(dims[0], length) if len(dims) == 1 else None,
        )
    return states
