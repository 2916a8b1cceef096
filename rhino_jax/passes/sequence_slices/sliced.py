"""A micro-batch whose sequence is cut into slices, as a function to be traced."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from jax import lax

from rhino_jax._compat import bind_eqn, tagged, untagged, without_dead_code
from rhino_jax.errors import InternalError
from rhino_jax.frontend.rules.reduce import COMBINE
from rhino_jax.ir.axes import AxisSpan, place
from rhino_jax.passes.interleaved.moves import split_shape
from rhino_jax.passes.microbatch.flow.evaluated import RECOMPUTED_KINDS, spot_of
from rhino_jax.passes.sequence_slices import refused
from rhino_jax.passes.sequence_slices.analysis import (
    SliceAnalysis,
    fitting,
    lengths_of,
    shapes_of,
)
from rhino_jax.passes.sequence_slices.flow import (
    PairState,
    RowState,
    SlicedOp,
    When,
    WholeSequence,
    ats_in,
)
from rhino_jax.passes.sequence_slices.opened import opened
from rhino_jax.passes.staged.apart import Apart
from rhino_jax.rewrite.emit import bind_local
from rhino_jax.rewrite.flat import FlatOp
from rhino_jax.rewrite.retraced import retraced


@dataclass(frozen=True, slots=True)
class SliceBounds:
    """Boundaries of the slices of a sequence.

    Attributes:
      bounds: first token of every slice, then the number of tokens.
    """

    bounds: tuple[int, ...]

    @property
    def count(self) -> int:
        return len(self.bounds) - 1

    def order(self, is_backward: bool) -> range:
        """Return the order in which a pass runs the slices."""
        return range(self.count - 1, -1, -1) if is_backward else range(self.count)

    def rows(self, span: AxisSpan, t: int) -> tuple[int, int]:
        """Return the range of slice t, within the tokens that a value holds."""
        return span.within(self.bounds[t], self.bounds[t + 1])

    def columns(self, span: AxisSpan, t: int) -> tuple[int, int]:
        """Return the range up to the end of slice t, within the tokens of a value."""
        return span.within(0, self.bounds[t + 1])


def taken(x: Any, span: AxisSpan, start: int, stop: int) -> Any:
    """Return tokens `start` to `stop` of those that an array holds.

    Args:
      x: the array.
      span: its sequence dim.
      start, stop: counted from the first token that it holds.
    """
    ends = start * span.inner, stop * span.inner
    if ends == (0, x.shape[span.dim] // span.outer):
        return x
    return _along(span, [x], lambda d, x: lax.slice_in_dim(x, *ends, axis=d))


def joined(parts: Sequence[Any], span: AxisSpan) -> Any:
    """Concatenate slices of an array along the tokens.

    Args:
      parts: the slices, in order.
      span: their sequence dim.
    """
    parts = [p for p in parts if p.shape[span.dim]] or list(parts[:1])
    if len(parts) == 1:
        return parts[0]
    return _along(span, parts, lambda d, *xs: lax.concatenate(xs, d))


def padded(x: Any, span: AxisSpan, count: int) -> Any:
    """Pad an array with `count` zeros after its tokens; `span` is its sequence dim."""

    def run(d: int, x: Any) -> Any:
        config = [(0, count * span.inner * (k == d), 0) for k in range(x.ndim)]
        return lax.pad(x, lax.full((), 0, x.dtype), config)

    return _along(span, [x], run) if count else x


def _along(span: AxisSpan, arrays: Sequence[Any], run: Callable[..., Any]) -> Any:
    """Run a function of a dim and arrays [.., tokens and inner, ..]; where arrays have
    an outer, that is a dim of its own before."""
    d, outer = span.dim, span.outer
    if outer == 1:
        return run(d, *arrays)
    made = run(
        d + 1,
        *(lax.reshape(x, split_shape(x.shape, d, outer)) for x in arrays),
    )
    size = outer * made.shape[d + 1]
    return lax.reshape(made, (*made.shape[:d], size, *made.shape[d + 2 :]))


SpanRange = tuple[AxisSpan, int, int]
"""Tokens of an array: its sequence dim, start, stop."""


@dataclass(eq=False)
class SliceEmitter:
    """A run of a micro-batch, slice by slice.

    Attributes:
      found: the analysis.
      slices: of the sequence.
      whole: value → array, of values that are known in full.
      parts: value → an array for each slice, of sliced values.
    """

    found: SliceAnalysis
    slices: SliceBounds
    whole: dict[int, Any] = field(default_factory=dict)
    parts: dict[int, list[Any]] = field(default_factory=dict)
    _cuts: dict[Any, Any] = field(default_factory=dict)

    @property
    def _ops(self) -> tuple[FlatOp, ...]:
        return self.found.piece.ops

    def run(self, *arrays: Any) -> list[Any]:
        """Return the outputs of the micro-batch.

        Args:
          arrays: its inputs.
        """
        program = self.found.program
        self.whole.update(zip(program.body.inputs, arrays, strict=True))
        self.whole.update(self.found.piece.flat.consts)
        for i, each in enumerate(self._ops):
            run, eqn = self.found.runs[i], each.eqn
            if i in self.found.known:
                for v in each.results:
                    self.whole[v] = self.whole[self.found.equal.twins[v]]
            elif run is None:
                self._once(i, eqn)
            elif not run.ats:
                self._window(i, eqn, run)
            else:
                self._sliced(i, run)
        return [self._result(v) for v in program.body.outputs]

    def _result(self, value: int) -> Any:
        state = self.found.states[value]
        if isinstance(state, WholeSequence):
            return self.whole[value]
        i = self.found.piece.flat.top.maker[value]
        with self._tag(self._last(state.is_backward), i):
            return self._full(value)

    def _last(self, is_backward: bool) -> int:
        return 0 if is_backward else self.slices.count - 1

    @contextlib.contextmanager
    def _tag(self, t: int | None, i: int) -> Iterator[None]:
        """Tag equations that are traced inside with their slice and source equation.

        Args:
          t: slice; None: none.
          i: position of the equation that they are a part of.
        """
        tag = f"{'' if t is None else t},{self.found.piece.sources[i]}"
        with tagged(tag), self._ops[i].context():
            yield

    def _once(self, i: int, eqn: Any) -> None:
        op = self._ops[i].op
        made = self.found.states[op.results[0]] if op.results else WholeSequence()
        assert isinstance(made, WholeSequence)
        t = None if made.when is When.FORWARD else self._last(made.when is When.END)
        with self._tag(t, i):
            results = bind_eqn(eqn, [*map(self._full, op.operands)], eqn.params)
        self.whole.update(zip(op.results, results, strict=True))

    def _full(self, value: int) -> Any:
        """Return a value in full."""
        if value not in self.whole:
            state, parts = self.found.states[value], self.parts[value]
            if isinstance(state, PairState):
                span, column = self._ordered(state.spans, state.tokens)
                ends = [self.slices.columns(column, t)[1] for t in range(len(parts))]
                parts = [
                    padded(x, column, column.size - end)
                    for x, end in zip(parts, ends, strict=True)
                ]
            else:
                assert isinstance(state, RowState)
                span = state.span
            self.whole[value] = joined(parts, span)
        return self.whole[value]

    def _ordered(
        self, dims: Sequence[Any], tokens: tuple[int, int] | None
    ) -> Sequence[Any]:
        """Return dims of tokens, the rows before the columns."""
        return dims[::-1] if tokens and self.found.rows.row(tokens) else dims

    def _sliced(self, i: int, run: SlicedOp) -> None:
        op, rule = self._ops[i].op, self._ops[i].op.rule
        assert rule is not None
        so_far: list[Any] | None = None
        made: list[list[Any]] = [[None] * self.slices.count for _ in op.results]
        for t in self.slices.order(run.is_backward):
            with self._tag(t, i):
                args = [
                    self._operand(i, k, v, run, t) for k, v in enumerate(op.operands)
                ]
                if run.is_chained and so_far is not None:
                    args = [*so_far, *args[1:]]
                to = [self._located(run, t, rule, layout) for layout in rule.results]
                results = self._bind(i, args, to)
                if run.sums is not None:
                    results = so_far = self._added(run, t, so_far, results)
                for k, state in enumerate(run.results):
                    made[k][t] = results[k]
                    if run.sums is not None and isinstance(state, RowState):
                        start, stop = self.slices.rows(state.span, t)
                        made[k][t] = taken(results[k], state.span, start, stop)
        for v, state, parts in zip(op.results, run.results, made, strict=True):
            if isinstance(state, WholeSequence):
                self.whole[v] = parts[self._last(run.is_backward)]
            else:
                self.parts[v] = parts

    def _added(
        self, run: SlicedOp, t: int, so_far: list[Any] | None, parts: list[Any]
    ) -> list[Any]:
        """Combine the results of the slices so far with those of one more."""
        if so_far is None or run.is_chained:
            return parts
        assert run.sums is not None
        added = []
        for state, before, part in zip(run.results, so_far, parts, strict=True):
            if isinstance(state, RowState):  # columns up to the end of this slice
                before = taken(before, state.span, *self.slices.columns(state.span, t))
            added.append(COMBINE[run.sums](before, part))
        return added

    def _located(
        self, run: SlicedOp, t: int, rule: Any, layout: Any
    ) -> list[SpanRange]:
        """Return which tokens of an operand or result an equation has in a slice."""
        both = self.slices.rows, self.slices.columns
        ats = zip(self._ordered(run.ats, run.tokens), both, strict=False)
        spans = ((place(rule, layout, at), bounds) for at, bounds in ats)
        return [(span, *bounds(span, t)) for span, bounds in spans if span is not None]

    def _operand(self, i: int, operand: int, value: int, run: SlicedOp, t: int) -> Any:
        state = self.found.states[value]
        if isinstance(state, PairState):
            return self.parts[value][t]
        rule = self._ops[i].op.rule
        assert rule is not None
        ranges = self._located(run, t, rule, rule.operands[operand])
        if isinstance(state, WholeSequence):
            return self._cut(value, ranges, i)
        row, *_ = self._ordered(run.ats, run.tokens)
        if ats_in(rule, rule.operands[operand], state) == [row]:
            x = self.parts[value][t]
        else:
            x = self._columns(value, state.span, t, run.is_backward)
        for span, start, stop in ranges:
            if span != state.span:  # the other dim of pairs: not sliced along it
                x = taken(x, span, start, stop)
        return x

    def _columns(self, value: int, span: AxisSpan, t: int, is_backward: bool) -> Any:
        """Return a value's slices up to this one, joined.

        Each pass joins them for itself: as residuals they would be T/2 times as large
        as the slices. Of values that the backward pass recomputes, earlier slices are
        those of the forward pass.
        """
        key = value, t, is_backward
        if key not in self._cuts:
            state = self.found.states[value]
            assert isinstance(state, RowState)
            before = self.found.equal.twins[value] if state.is_backward else value
            parts = [*self.parts[before][:t], self.parts[value][t]]
            self._cuts[key] = joined(parts, span)
        return self._cuts[key]

    def _cut(self, value: int, ranges: Sequence[SpanRange], reader: int) -> Any:
        """Return some tokens of a value that is known in full.

        Slices of values that depend on inputs alone do so too, and belong to no slice.
        """
        x = self.whole[value]
        if not ranges:
            return x
        key = value, tuple(ranges)
        if key not in self._cuts:
            state = self.found.states[value]
            assert isinstance(state, WholeSequence)
            is_early = state.when is When.FORWARD
            made = self._recomputed(value, ranges) if is_early else None
            if made is None:
                tag = self._tag(None, reader) if is_early else contextlib.nullcontext()
                with tag:
                    made = functools.reduce(lambda x, r: taken(x, *r), ranges, x)
            self._cuts[key] = made
        return self._cuts[key]

    def _recomputed(self, value: int, ranges: Sequence[SpanRange]) -> Any:
        """Compute some tokens of a value that is elementwise in inputs alone.

        It reads only those tokens of its operands. None where it is not elementwise.
        """
        i = self.found.piece.flat.top.maker.get(value, -1)
        each = self._ops[i]
        if (
            i < 0
            or each.op.traits.kind not in RECOMPUTED_KINDS
            or len(each.results) != 1
        ):
            return None
        ats = [spot_of(each, value, span) for span, _, _ in ranges]
        if each.op.rule is None or None in ats:
            return None
        args = []
        for v, layout in zip(each.operands, each.op.rule.operands, strict=True):
            read = [
                (span, start, stop)
                for at, (_, start, stop) in zip(ats, ranges, strict=True)
                if at and (span := place(each.op.rule, layout, at))
            ]
            args.append(self._cut(v, read, i))
        with self._tag(None, i):
            return self._bind(i, args, [ranges])[0]

    def _bind(
        self, i: int, args: Sequence[Any], ranges: Sequence[Sequence[SpanRange]]
    ) -> list[Any]:
        """Run an equation on some tokens.

        Args:
          i: its position.
          args: operands.
          ranges: for every result the tokens that it has.
        """
        op, eqn = self._ops[i].op, self._ops[i].eqn
        shapes = [
            functools.reduce(
                lambda shape, r: r[0].resized(shape, r[2] - r[1]),
                spans,
                tuple(v.aval.shape),
            )
            for v, spans in zip(eqn.outvars, ranges, strict=True)
        ]
        results = bind_local(eqn, args, shapes)
        made = [tuple(x.shape) for x in results]
        if made != shapes:
            raise InternalError(
                f"`{op.name}` of a slice of tokens makes other shapes than it should.",
                where=str(op.source),
                numbers=f"{made}, not {shapes}",
                fix="take another schedule than `token-slices`, and report this, with"
                " the program that shows it.",
            )
        return results

    def _window(self, i: int, eqn: Any, run: SlicedOp) -> None:
        """Run a slice or pad of rows on every sequence slice."""
        op = self._ops[i].op
        (made,) = run.results
        read = self.found.states[op.operands[0]]
        assert isinstance(read, RowState) and isinstance(made, RowState)
        d = read.span.dim
        parts: list[Any] = [None] * self.slices.count
        for t in self.slices.order(run.is_backward):
            low, high = self.slices.rows(read.span, t)
            start, stop = self.slices.rows(made.span, t)
            moved = made.span.first - read.span.first
            before, after = start + moved - low, high - stop - moved
            if low == high or start == stop:  # all is padding, or nothing remains
                before, after = 0, (high - low) - (stop - start)
            changed: dict[str, Any] = {"padding_config": (-before, -after, 0)}
            if op.name == "slice":
                stop = high - low - after
                changed = {"start_indices": before, "limit_indices": stop}
            params = dict(eqn.params)
            for key, at in changed.items():
                params[key] = (*params[key][:d], at, *params[key][d + 1 :])
            with self._tag(t, i):
                args = [
                    self.parts[op.operands[0]][t],
                    *map(self.whole.get, op.operands[1:]),
                ]
                (parts[t],) = bind_eqn(eqn, args, params)
        self.parts[op.results[0]] = parts


@dataclass(frozen=True, slots=True, eq=False)
class SlicedBody:
    """A micro-batch that runs slice by slice.

    The forward pass runs slices in order, the backward pass last to first; values that
    a slice reads of others were computed earlier in this order.

    Attributes:
      piece: closed jaxpr of the arguments and results of `Apart.piece`.
      slice_of: for every equation its slice; None of those on inputs alone.
      source: for every equation the position of the one in `Apart.piece` that it is a
        part of.
    """

    piece: Any
    slice_of: tuple[int | None, ...]
    source: tuple[int | None, ...]


def sliced(apart: Apart, lengths: Sequence[int]) -> SlicedBody:
    """Cut the sequence of a micro-batch into slices.

    Args:
      apart: the step.
      lengths: tokens of every slice.
    Raises:
      TokenSliceError: a token needs later ones, it cannot be proved that none does, or
        the lengths do not add up to the sequence. Source: Li et al. 2021 (TeraPipe),
        section 3.2.
    """
    found = _found(apart)
    if sum(lengths) != found.length or any(n < 1 for n in lengths):
        raise refused.lengths_wrong(lengths, found.length)
    bounds = SliceBounds(tuple(accumulate(lengths, initial=0)))
    emitter = SliceEmitter(found, bounds)
    new = without_dead_code(retraced(apart.piece, emitter.run))
    piece, tags = untagged(new)
    pairs = [(None, None) if tag is None else _read(tag) for tag in tags]
    return SlicedBody(piece, tuple(t for t, _ in pairs), tuple(i for _, i in pairs))


def sequence_length(apart: Apart) -> int:
    """Return the number of tokens of the sequence that slices cut.

    Raises:
      TokenSliceError: as `sliced` does.
    """
    return _found(apart).length


@functools.lru_cache(maxsize=2)
def _found(apart: Apart) -> SliceAnalysis:
    """Analyse a micro-batch; cached, as the choice of slices asks several times."""
    lengths = lengths_of(apart)
    if not lengths:
        raise refused.no_sequence(apart, shapes_of(apart))
    return fitting(apart, opened(apart, lengths), lengths)


def _read(tag: str) -> tuple[int | None, int | None]:
    t, i = tag.split(",")
    return int(t) if t else None, int(i)
