"""Analysis of a micro-batch: which values are sliced along the sequence, and where."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rhino_jax._compat import is_literal, jaxpr_consts, open_jaxpr
from rhino_jax.errors import TokenSliceError
from rhino_jax.ir.axes import AxisSpan, FactorSpan, follow, locate
from rhino_jax.ir.factor import FactorKind
from rhino_jax.ir.program import Op, Program
from rhino_jax.ir.traits import OpKind
from rhino_jax.passes.sequence_slices import refused
from rhino_jax.passes.sequence_slices.bounds import (
    MAX_ELEMENTS,
    Bounds,
    Masks,
    exactly,
    is_number,
    unknown,
)
from rhino_jax.passes.sequence_slices.flow import (
    UNMASKED,
    Corners,
    OnPairs,
    SlicedOp,
    Stuck,
    ats_in,
    ats_of,
    end_of,
    on_rows,
    on_window,
)
from rhino_jax.passes.sequence_slices.opened import OpenedProgram, twins_of
from rhino_jax.passes.sequence_slices.states import (
    Cause,
    Cross,
    Fill,
    RowState,
    State,
    When,
    WholeSequence,
)
from rhino_jax.passes.staged.apart import Apart


def first_states(
    apart: Apart, piece: OpenedProgram, length: int, masks: Masks
) -> dict[int, WholeSequence]:
    """Return states of the inputs of a micro-batch, by their ids in the program.

    Args:
      apart: the step.
      piece: its micro-batch, calls inlined.
      length: of the sequence, in tokens.
      masks: cache of bounds.
    """
    ids = piece.program.body.inputs
    states = {ids[0]: WholeSequence(is_free=True)}
    known = _bounds(apart.before, apart.captured, masks)
    for i, crossing in enumerate(apart.entering):
        value = ids[1 + i]
        shape = piece.program.values[value].shape
        span = None
        if crossing.how == "sliced":
            dims = [d for d in _dims(apart, i, len(shape)) if shape[d] == length]
            span = AxisSpan(dims[0], length) if len(dims) == 1 else None
        bounds = known[i]
        is_free = 1 + i not in piece.weights or bool(bounds and bounds.is_exact)
        states[value] = WholeSequence(is_free=is_free, span=span, bounds=bounds)
    consts = jaxpr_consts(apart.piece)
    for value, const in zip(ids[len(ids) - len(consts) :], consts, strict=True):
        states[value] = WholeSequence(is_free=True, bounds=_captured(const))
    return states


def lengths_of(apart: Apart) -> list[int]:
    """Return candidates for the length of the sequence, likeliest first.

    Data have their sequence in a dim that is not their batch: tokens and labels of that
    length, or text that has one more token, of which a step takes both.
    """
    found: dict[int, int] = {}
    avals = [v.aval for v in open_jaxpr(apart.piece).invars[1:]]
    for i, crossing in enumerate(apart.entering):
        if crossing.how != "sliced":
            continue
        shape, dtype = avals[i].shape, avals[i].dtype
        dims = list(_dims(apart, i, len(shape)))
        for k, d in enumerate(dims):
            # Tokens are integers; features come after the sequence.
            score = 2 * np.issubdtype(dtype, np.integer) + (k == 0)
            found[shape[d]] = found.get(shape[d], 0) + int(score)
    best = sorted((s for s in found if s > 1), key=lambda s: (-found[s], -s))
    return [*dict.fromkeys([*best, *(s - 1 for s in best if s > 2)])]


def shapes_of(apart: Apart) -> list[tuple[int, ...]]:
    """Return the shapes of the data, as a micro-batch reads them."""
    avals = [v.aval for v in open_jaxpr(apart.piece).invars[1:]]
    pairs = zip(apart.entering, avals, strict=False)
    return [tuple(aval.shape) for crossing, aval in pairs if crossing.how == "sliced"]


def _dims(apart: Apart, position: int, rank: int) -> Iterator[int]:
    """Yield the dims of an input but those of the batch.

    Args:
      apart: the step.
      position: of the input, which is [.., outer, rows, micro-batches, inner, ..].
      rank: of the input.
    """
    first = apart.entering[position].span.dim
    return (d for d in range(rank) if d not in (first + 1, first + 2))


def _bounds(closed: Any, captured: Sequence[Any], masks: Masks) -> list[Bounds | None]:
    """Return bounds of a program's results for known constants and any other inputs.

    Args:
      closed: the program; constants are its last inputs.
      captured: these constants.
      masks: cache of bounds.
    """
    jaxpr = open_jaxpr(closed)
    of: dict[Any, Bounds | None] = {}
    for v in jaxpr.invars:
        of[v] = unknown(v.aval.dtype, len(v.aval.shape))
    for v, const in (
        *zip(reversed(jaxpr.invars), reversed(captured), strict=False),
        *zip(jaxpr.constvars, jaxpr_consts(closed), strict=True),
    ):
        of[v] = _captured(const)

    def read(v: Any) -> Bounds | None:
        return masks.literal(v.val) if is_literal(v) else of[v]

    for eqn in jaxpr.eqns:
        made = masks.of(eqn, [read(v) for v in eqn.invars])
        of.update(dict.fromkeys(eqn.outvars, made))
    return [read(v) for v in jaxpr.outvars]


def _captured(const: Any) -> Bounds | None:
    """Return the bounds of a constant; None if it is not fully on this machine."""
    dtype = getattr(const, "dtype", np.dtype(object))
    if not is_number(dtype) or not getattr(const, "is_fully_addressable", True):
        return None
    return None if np.size(const) > MAX_ELEMENTS else exactly(const)


@dataclass(slots=True)
class SliceAnalysis:
    """States of a micro-batch's values, and slicing of its equations.

    Attributes:
      piece: the micro-batch.
      length: of the sequence, in tokens.
      states: for every value, by its id in the program.
      runs: for every equation how it runs slice by slice; None: once, on whole values.
      twins: value of the backward pass → the equal value of the forward pass.
      known: equations that recompute values that the forward pass produced in full.
      corners: masks by row and column.
      masks: bounds of whole masks.
    """

    piece: OpenedProgram
    length: int
    states: dict[int, State]
    twins: dict[int, int]
    runs: list[SlicedOp | None] = field(default_factory=list)
    known: set[int] = field(default_factory=set)
    corners: Corners = field(default_factory=Corners)
    masks: Masks = field(default_factory=Masks)

    @property
    def program(self) -> Program:
        return self.piece.program


def analyse(apart: Apart, piece: OpenedProgram, length: int) -> SliceAnalysis:
    """Walk a micro-batch.

    Args:
      apart: the step.
      piece: its micro-batch, calls inlined.
      length: of the sequence, in tokens.
    Raises:
      TokenSliceError: a token needs later ones, or it cannot be proved that none does.
    """
    if apart.early:
        raise refused.coupled(apart)
    masks = Masks()
    first: dict[int, State] = {**first_states(apart, piece, length, masks)}
    found = SliceAnalysis(piece, length, first, twins_of(apart, piece), masks=masks)
    for i, each in enumerate(piece.ops):
        op, eqn = each.op, each.eqn
        for v in each.operands:
            if v in piece.flat.consts:
                bounds = found.masks.literal(piece.flat.consts[v])
                found.states[v] = WholeSequence(is_free=True, bounds=bounds)
        states = [found.states[v] for v in op.operands]
        run: SlicedOp | None = None
        made: Sequence[State]
        if _is_known(found, op):
            found.known.add(i)
            made = [found.states[found.twins[v]] for v in op.results]
        else:
            run, made = _walk(found, i, eqn, states)
        found.runs.append(run)
        found.states.update(zip(op.results, made, strict=True))
    settle(found)
    return found


def _is_known(found: SliceAnalysis, op: Op) -> bool:
    """Whether an op recomputes values that the forward pass produced of all slices."""
    twins = [found.states.get(found.twins.get(v, -1)) for v in op.results]
    return bool(twins) and all(
        isinstance(s, WholeSequence) and s.when is When.BACKWARD for s in twins
    )


def _walk(
    found: SliceAnalysis, i: int, eqn: Any, states: Sequence[State]
) -> tuple[SlicedOp | None, Sequence[State]]:
    op, run = found.piece.ops[i].op, _run(found, i, eqn, states)
    if isinstance(run, SlicedOp):
        _check_known(found, op, states, run.is_backward)
        if not _is_raising(op) and any(_may_be_extreme(s, op) for s in states):
            made = tuple(_extreme(s) for s in run.results)
            run = replace(run, results=made)
        return run, run.results
    count = len(op.results)
    return None, [_whole(found, op, eqn, states, k, run) for k in range(count)]


def _is_raising(op: Op) -> bool:
    """Whether results are not as extreme as one of the operands may be.

    `reduce_max` runs only on pairs of which every row has a column that is not low.
    """
    traits = op.traits
    return traits.is_bounded or traits.limit is not None or traits.reducer == "max"


def _may_be_extreme(state: State, op: Op) -> bool:
    """Whether an operand may make the rows of an op as extreme as masked ones.

    High ones that are added or chosen may; numbers of elements, by which means divide,
    are as high.
    """
    if isinstance(state, RowState):
        return state.may_be_extreme
    bounds = state.bounds if isinstance(state, WholeSequence) else None
    if bounds is None:
        return False
    traits = op.traits
    adds = traits.is_choice or (traits.is_elementwise and traits.reducer == "sum")
    return bounds.may_be_low or (bounds.may_be_high and adds)


def _extreme(state: State) -> State:
    return replace(state, may_be_extreme=True) if isinstance(state, RowState) else state


def settle(found: SliceAnalysis) -> None:
    """Check what is known only at the end: which dim of pairs has the rows.

    Raises:
      TokenSliceError: the backward pass, which runs slices last to first, needs rows of
        earlier ones; or unmasked pairs are outputs of the micro-batch.
    """
    for i, run in enumerate(found.runs):
        if run is None or run.pair is None:
            continue
        op = found.piece.ops[i].op
        if run.pair.row is None:
            run.pair.decide(0)  # nothing depends on which it is
        assert op.rule is not None
        for v, layout in zip(op.operands, op.rule.operands, strict=True):
            state = found.states[v]
            if not isinstance(state, RowState) or not state.is_backward:
                continue
            twin = found.states.get(found.twins.get(v, -1))
            is_column = ats_in(op.rule, layout, state) == [run.column]
            if is_column and not (
                isinstance(twin, RowState) and twin.span == state.span
            ):
                why = "reads, of earlier slices, what the backward pass makes after it"
                raise refused.not_causal(found.program, found.length, op, why)
    for v in found.program.body.outputs:
        state = found.states[v]
        if isinstance(state, Cross) and state.later.fill is not Fill.ZERO:
            op = next(o for o in found.program.ops if v in o.results)
            raise refused.not_causal(found.program, found.length, op, UNMASKED)


def _run(
    found: SliceAnalysis, i: int, eqn: Any, states: Sequence[State]
) -> SlicedOp | Stuck | None:
    """Return how an equation runs slice by slice; None where no operand is sliced."""
    op, is_backward = found.piece.ops[i].op, found.piece.is_backward[i]
    if all(isinstance(s, WholeSequence) for s in states):
        at = _meeting(op, states)
        run = None if at is None else on_rows(op, at, is_backward)
        return run if isinstance(run, SlicedOp) and run.sums is None else None
    done = _done(found, i, eqn, states)
    if isinstance(done, SlicedOp):
        return done
    window = on_window(op, eqn, states[0], is_backward, found.length)
    if window is not None:
        return window
    pairs = [s for s in states if isinstance(s, Cross)]
    if done.is_refused or any(s.later.fill is not Fill.ZERO for s in pairs):
        why = done.why if done.is_refused else f"{done.why}, and {UNMASKED}"
        raise refused.not_causal(found.program, found.length, op, why)
    return done


def _done(
    found: SliceAnalysis, i: int, eqn: Any, states: Sequence[State]
) -> SlicedOp | Stuck:
    op, is_backward = found.piece.ops[i].op, found.piece.is_backward[i]
    ats = ats_of(op, states)
    if isinstance(ats, Stuck):
        return ats
    if len(ats) == 1:
        return on_rows(op, ats[0], is_backward)
    first, second = ats
    pairs = OnPairs(op, eqn, states, (first, second), is_backward, found.corners)
    return pairs.done()


def _meeting(op: Op, states: Sequence[State]) -> FactorSpan | None:
    """Find where data meet weights along the sequence; slices begin there."""
    wholes = [s for s in states if isinstance(s, WholeSequence)]
    if op.rule is None or all(s.is_free for s in wholes):
        return None
    if any(s.when is not When.FORWARD for s in wholes):
        return None
    ats = set[FactorSpan | None]()
    for layout, state in zip(op.rule.operands, wholes, strict=True):
        if state.span is not None:
            ats.add(locate(op.rule, layout, state.span))
    at = ats.pop() if len(ats) == 1 else None
    if at is None or op.rule.factors[at.factor].kind is not FactorKind.PARALLEL:
        return None
    return at


def _check_known(
    found: SliceAnalysis, op: Op, states: Sequence[State], is_backward: bool
) -> None:
    """Refuse an op that reads in a slice what is known only after all slices."""
    before = When.BACKWARD if is_backward else When.FORWARD
    for state in states:
        if isinstance(state, WholeSequence) and state.when > before:
            assert state.cause is not None
            raise refused.late(found.program, found.length, state.cause, op)


def _whole(
    found: SliceAnalysis,
    op: Op,
    eqn: Any,
    states: Sequence[State],
    result: int,
    stuck: Stuck | None,
) -> WholeSequence:
    """Return the state of a result of an op that runs once, on whole values."""
    known = [s if isinstance(s, WholeSequence) else None for s in states]
    when = max(
        (
            end_of(s.is_backward) if not isinstance(s, WholeSequence) else s.when
            for s in states
        ),
        default=When.FORWARD,
    )
    cause = next((s.cause for s in known if s is not None and s.when is when), None)
    if stuck is not None:
        cause = Cause(op.id, stuck.why)
    is_free = all(s is not None and s.is_free for s in known)
    bounds = None
    if when is When.FORWARD:
        bounds = found.masks.of(eqn, [None if s is None else s.bounds for s in known])
    is_data = is_free and not (bounds is not None and bounds.is_exact)
    span = _place(found, op, states, result) if is_data else None
    return WholeSequence(when, is_free, span, bounds, cause)


def _place(
    found: SliceAnalysis, op: Op, states: Sequence[State], result: int
) -> AxisSpan | None:
    """Return the dim of a result of data alone that seems to be the sequence, or None.

    Such a value is known in full, so that slicing it along any dim is correct.
    """
    if op.rule is None:
        return None
    spans = set[AxisSpan | None]()
    for layout, state in zip(op.rule.operands, states, strict=True):
        if isinstance(state, WholeSequence) and state.span is not None:
            to = op.rule.results[result]
            spans.add(follow(op.rule, layout, state.span, to))
    spans.discard(None)
    shape = found.program.values[op.results[result]].shape
    dims = [d for d, size in enumerate(shape) if size == found.length]
    if not spans and _is_resizing(found.program, op) and len(dims) == 1:
        return AxisSpan(dims[0], found.length)
    return spans.pop() if len(spans) == 1 else None


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
    errors: list[TokenSliceError] = []
    for length in lengths:
        try:
            found = analyse(apart, piece, length)
        except TokenSliceError as error:
            errors.append(error)
            continue
        if any(run is not None for run in found.runs):
            return found
    if errors:
        raise errors[0]
    raise refused.no_sequence(apart, shapes_of(apart))
