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
)
from rhino_jax.passes.sequence_slices.flow import (
    SlicedOp,
    SlicedState,
    When,
    WholeSequence,
    ats_in,
)
from rhino_jax.passes.sequence_slices.opened import opened
from rhino_jax.passes.staged.apart import Apart
from rhino_jax.rewrite.emit import bind_local
from rhino_jax.rewrite.flat import FlatOp
from rhino_jax.rewrite.retraced import retraced


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
      ends: first token of every slice, then the number of tokens.
      whole: value → array, of values that are known in full.
      parts: value → an array for each slice, of sliced values.
    """

    found: SliceAnalysis
    ends: tuple[int, ...]
    whole: dict[int, Any] = field(default_factory=dict)
    parts: dict[int, list[Any]] = field(default_factory=dict)
    _cuts: dict[Any, Any] = field(default_factory=dict)

    @property
    def _ops(self) -> tuple[FlatOp, ...]:
        return self.found.piece.ops

    def _order(self, is_backward: bool) -> range:
        """Return the order in which a pass runs the slices."""
        return range(len(self.ends) - 1)[:: -1 if is_backward else 1]

    def run(self, *arrays: Any) -> list[Any]:
        """Return the outputs of the micro-batch.

        Args:
          arrays: its inputs.
        """
        piece = self.found.piece
        self.whole.update(zip(piece.program.body.inputs, arrays, strict=True))
        self.whole.update(piece.flat.consts)
        for i, (each, run) in enumerate(zip(self._ops, self.found.runs, strict=True)):
            if i in self.found.known:
                for v in each.results:
                    self.whole[v] = self.whole[piece.twins[v]]
            elif run is None:
                self._once(i)
            else:
                self._sliced(i, run)
        return [*map(self._result, piece.program.body.outputs)]

    def _result(self, value: int) -> Any:
        state = self.found.states[value]
        if isinstance(state, WholeSequence):
            return self.whole[value]
        with self._tag(self._order(state.is_backward)[-1], state.op):
            return self._full(value)

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

    def _once(self, i: int) -> None:
        op, eqn = self._ops[i].op, self._ops[i].eqn
        made = self.found.states[op.results[0]] if op.results else WholeSequence()
        assert isinstance(made, WholeSequence)
        last = self._order(made.when is When.END)[-1]
        with self._tag(None if made.when is When.FORWARD else last, i):
            results = bind_eqn(eqn, [*map(self._full, op.operands)], eqn.params)
        self.whole.update(zip(op.results, results, strict=True))

    def _full(self, value: int) -> Any:
        """Return a value in full."""
        if value not in self.whole:
            state, parts = self.found.states[value], [*self.parts[value]]
            assert isinstance(state, SlicedState)
            span, *columns = self._ordered(state.spans, state.op)
            for column in columns:  # Later ones are zero.
                for t, x in enumerate(parts):
                    left = column.size - self._range(column, t, True)[1]
                    zeros = lax.full(column.resized(x.shape, left), 0, x.dtype)
                    parts[t] = joined([x, zeros], column)
            self.whole[value] = joined(parts, span)
        return self.whole[value]

    def _ordered(self, dims: Sequence[Any], i: int) -> Sequence[Any]:
        """Return dims of an op's tokens, the rows before the columns."""
        return dims[::-1] if len(dims) > 1 and self.found.rows.row(i) else dims

    def _range(
        self, span: AxisSpan, t: int, is_column: bool = False
    ) -> tuple[int, int]:
        """Return the rows of slice t, or the columns up to its end, within the tokens
        that a value holds."""
        return span.within(0 if is_column else self.ends[t], self.ends[t + 1])

    def _sliced(self, i: int, run: SlicedOp) -> None:
        op, order = self._ops[i].op, self._order(run.is_backward)
        so_far: list[Any] | None = None
        made: list[list[Any]] = [[None] * len(order) for _ in op.results]
        for t in order:
            with self._tag(t, i):
                if run.ats:
                    results = so_far = self._in_slice(i, run, t, so_far)
                else:
                    results = self._window(i, run, t)
                for parts, state, x in zip(made, run.results, results, strict=True):
                    is_sum = run.sums and isinstance(state, SlicedState)
                    parts[t] = taken(x, *self._rows_of(state, t)) if is_sum else x
        for v, state, parts in zip(op.results, run.results, made, strict=True):
            if isinstance(state, WholeSequence):
                self.whole[v] = parts[order[-1]]
            else:
                self.parts[v] = parts

    def _rows_of(self, state: Any, t: int) -> SpanRange:
        (span,) = state.spans
        return span, *self._range(span, t)

    def _in_slice(
        self, i: int, run: SlicedOp, t: int, so_far: list[Any] | None
    ) -> list[Any]:
        """Run an equation on a slice; where results of slices are combined, with those
        so far."""
        each = self._ops[i]
        args = [self._operand(i, k, run, t) for k in range(len(each.operands))]
        if run.is_chained and so_far is not None:
            args = [*so_far, *args[1:]]
        to = [self._located(i, run, t, layout) for layout in each.rule.results]
        results = self._bind(i, args, to)
        if run.sums is None or so_far is None or run.is_chained:
            return results
        added = []
        for of, before, part in zip(to, so_far, results, strict=True):
            for columns in of:  # up to the end of this slice
                before = taken(before, *columns)
            added.append(COMBINE[run.sums](before, part))
        return added

    def _located(self, i: int, run: SlicedOp, t: int, layout: Any) -> list[SpanRange]:
        """Return which tokens of an operand or result an equation has in a slice."""
        ats = self._ordered(run.ats, i)
        spans = [place(self._ops[i].rule, layout, at) for at in ats]
        return [
            (span, *self._range(span, t, k > 0))
            for k, span in enumerate(spans)
            if span is not None
        ]

    def _operand(self, i: int, k: int, run: SlicedOp, t: int) -> Any:
        value, rule = self._ops[i].operands[k], self._ops[i].rule
        state = self.found.states[value]
        ranges = self._located(i, run, t, rule.operands[k])
        if isinstance(state, WholeSequence):
            return self._cut(value, ranges, i)
        x = self.parts[value][t]
        if state.is_pairs:
            return x
        if ats_in(rule, rule.operands[k], state) != [self._ordered(run.ats, i)[0]]:
            x = self._columns(value, state, t, run.is_backward)
        for span, start, stop in ranges:
            if span != state.spans[0]:  # the other dim of pairs: not sliced along it
                x = taken(x, span, start, stop)
        return x

    def _columns(
        self, value: int, state: SlicedState, t: int, is_backward: bool
    ) -> Any:
        """Return a value's slices up to this one, joined.

        Each pass joins them for itself: as residuals they would be T/2 times as large
        as the slices. Of values that the backward pass recomputes, earlier slices are
        those of the forward pass.
        """
        key = value, t, is_backward
        if key not in self._cuts:
            before = self.found.piece.twins[value] if state.is_backward else value
            parts = [*self.parts[before][:t], self.parts[value][t]]
            self._cuts[key] = joined(parts, state.spans[0])
        return self._cuts[key]

    def _cut(self, value: int, ranges: Sequence[SpanRange], reader: int) -> Any:
        """Return some tokens of a value that is known in full.

        Slices of values that depend on inputs alone do so too, and belong to no slice.
        """
        key, state = (value, *ranges), self.found.states[value]
        if ranges and key not in self._cuts:
            assert isinstance(state, WholeSequence)
            is_early = state.when is When.FORWARD
            made = self._recomputed(value, ranges) if is_early else None
            if made is None:
                tag = self._tag(None, reader) if is_early else contextlib.nullcontext()
                with tag:
                    made = self.whole[value]
                    for each in ranges:
                        made = taken(made, *each)
            self._cuts[key] = made
        return self._cuts[key] if ranges else self.whole[value]

    def _recomputed(self, value: int, ranges: Sequence[SpanRange]) -> Any:
        """Compute some tokens of a value that is elementwise in inputs alone.

        It reads only those tokens of its operands. None where it is not elementwise.
        """
        i = self.found.piece.flat.top.maker.get(value)
        if i is None or self._ops[i].op.traits.kind not in RECOMPUTED_KINDS:
            return None
        each, rule = self._ops[i], self._ops[i].op.rule
        ats = [spot_of(each, value, span) for span, _, _ in ranges]
        if len(each.results) != 1 or rule is None or None in ats:
            return None
        args = []
        for v, layout in zip(each.operands, rule.operands, strict=True):
            read = [
                (span, start, stop)
                for at, (_, start, stop) in zip(ats, ranges, strict=True)
                if at and (span := place(rule, layout, at))
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
        shapes = [tuple(v.aval.shape) for v in eqn.outvars]
        for k, spans in enumerate(ranges):
            for span, start, stop in spans:
                shapes[k] = span.resized(shapes[k], stop - start)
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

    def _window(self, i: int, run: SlicedOp, t: int) -> list[Any]:
        """Run a slice or pad of rows on a sequence slice."""
        op, eqn = self._ops[i].op, self._ops[i].eqn
        read, low, high = self._rows_of(self.found.states[op.operands[0]], t)
        made, start, stop = self._rows_of(run.results[0], t)
        moved, d = made.first - read.first, read.dim
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
        first, *others = op.operands
        args = [self.parts[first][t], *map(self.whole.get, others)]
        return bind_eqn(eqn, args, params)


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
    emitter = SliceEmitter(found, tuple(accumulate(lengths, initial=0)))
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
    return fitting(apart, opened(apart, lengths), lengths)


def _read(tag: str) -> tuple[int | None, int | None]:
    t, i = tag.split(",")
    return int(t) if t else None, int(i)
