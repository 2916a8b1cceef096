"""A micro-batched step as three programs: before the loop, its body, and after it.

Where the rows of the batch meet once (contrastive logits, a balancing loss), a step has
two loops. The second recomputes what the first did, and then what needs values of all
rows: as one body it runs once, and waits midway for what couples the micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from rhino_jax._compat import (
    consts_as_inputs,
    is_literal,
    jaxpr_consts,
    open_jaxpr,
    without_dead_code,
)
from rhino_jax.errors import CoupledBatchError, MicrobatchError
from rhino_jax.ir.axes import AxisSpan
from rhino_jax.ir.program import Program
from rhino_jax.passes.microbatch.cut import (
    LoopCrossing,
    MicrobatchChoice,
    MicrobatchCut,
    MicrobatchLoop,
)
from rhino_jax.passes.microbatch.cutting import find_cut
from rhino_jax.passes.microbatch.emit.accumulated import (
    combined,
    start,
    sum_dtype,
)
from rhino_jax.passes.microbatch.emit.piece import PieceEmitter
from rhino_jax.passes.microbatch.emit.pieces import Piece, Split, together, view
from rhino_jax.passes.microbatch.flow.analysis import FlowResult
from rhino_jax.rewrite.flat import FlatProgram
from rhino_jax.rewrite.retraced import traced_on


MAX_LOOPS = 2
"""Largest number of loops: one up to what couples the batch, one that depends on it."""


@dataclass(frozen=True, slots=True, eq=False)
class Apart:
    """A step whose batch runs in equal micro-batches, as separate programs.

    Attributes:
      cut: which ops run in and outside of the loop.
      before: closed jaxpr; the step's inputs → inputs of a micro-batch (`entering`):
        whole values as they are, data as [.., rows of a micro-batch, micro-batches,
        ..].
      piece: closed jaxpr of a micro-batch; its number, `entering` → its outputs.
      after: closed jaxpr; the step's inputs, accumulated outputs of all micro-batches →
        results.
      entering, leaving: values that cross the loop's border.
      sources: for every value that enters, positions of the step's inputs that it
        depends on; empty for what is coupled.
      data: positions of the inputs that hold the batch.
      between: closed jaxpr; the step's inputs, accumulated early outputs of all
        micro-batches → `coupled`.
      early: how many of the outputs, the first ones, are read by `between`; 0 where
        micro-batches are not coupled.
      coupled: inputs of a micro-batch, after all of `entering`, that `between`
        computes.
      captured: constants that the step captured, its last inputs.
      at: for every equation of `piece` the chunk in which it runs, None where that is
        not known; empty where it follows from what equations read.
    """

    cut: MicrobatchCut
    before: Any
    piece: Any
    after: Any
    entering: tuple[LoopCrossing, ...]
    leaving: tuple[LoopCrossing, ...]
    sources: tuple[frozenset[int], ...]
    data: frozenset[int]
    between: Any
    early: int
    coupled: tuple[LoopCrossing, ...]
    captured: tuple[Any, ...] = ()
    at: tuple[int | None, ...] = ()

    def sum_type(self, position: int) -> Any:
        """Return the type of an accumulated output: at least float32 for float sums."""
        crossing = self.leaving[position]
        aval = open_jaxpr(self.piece).outvars[position].aval
        shape = aval.shape
        if crossing.how == "stacked":
            shape = (self.cut.count, *shape)
        return jax.core.ShapedArray(shape, sum_dtype(crossing, aval.dtype))

    def start(self, position: int) -> Any:
        """Return the initial value of an accumulated output."""
        aval = self.sum_type(position)
        return start(self.leaving[position], aval.shape, aval.dtype)

    def combined(self, position: int, so_far: Any, part: Any, index: Any) -> Any:
        """Accumulate the output of one more micro-batch.

        Args:
          position: of the output.
          so_far: accumulated output of the micro-batches before.
          part: output of this micro-batch.
          index: number of the micro-batch.
        """
        how = self.leaving[position].how
        if how == "stacked":
            return lax.dynamic_update_index_in_dim(so_far, part, index, 0)
        return combined(how, so_far, part)

    def finished(self, position: int, x: Any, dtype: Any) -> Any:
        """Convert an accumulated output to its value in the step without the loop."""
        crossing = self.leaving[position]
        if crossing.how == "stacked":
            split = Split.of(self.cut.rows, self.cut.count)
            x = together(x, None, crossing.span, split)
        return lax.convert_element_type(x, dtype)


def cut_for_stages(
    closed: Any, program: Program, choice: MicrobatchChoice, *, is_even: bool = False
) -> tuple[MicrobatchCut, FlowResult]:
    """Call `find_cut`; its errors suggest what stages allow instead."""
    try:
        return find_cut(closed, program, choice, is_even=is_even)
    except MicrobatchError as error:
        what = error.what
        fix = error.fix.replace("`microbatches=1`", "`stages=1, microbatches=1`")
        if isinstance(error, CoupledBatchError):
            most = choice.most_loops
            what += f" Stages pass on micro-batches in {most} loops at most."
            fix = (
                "plan with stages=1; or let the rows meet once, and again only in what"
                f" is no larger than the data, as their losses are; or {fix}"
            )
        raise type(error)(
            what, where=error.where, numbers=error.numbers, fix=fix
        ) from None


def take_apart(
    closed: Any,
    program: Program,
    count: int,
    places: tuple[str, ...] = (),
) -> Apart:
    """Divide a step into programs before, in and after its loop over micro-batches.

    Args:
      closed: a closed jaxpr.
      program: imported from it.
      count: number of micro-batches.
      places: as `MicrobatchChoice.per_microbatch`: ops whose sums over the batch are
        those of a micro-batch.
    Raises:
      MicrobatchError: the batch cannot be divided so, or needs more than two loops.
    """
    choice = MicrobatchChoice(
        count, most_loops=MAX_LOOPS, per_microbatch=places, least=1
    )
    cut, found = cut_for_stages(closed, program, choice, is_even=True)
    opened = consts_as_inputs(open_jaxpr(closed))
    parts = _Parts(found, cut)
    inputs, early = [v.aval for v in opened.invars], parts.early
    first = without_dead_code(traced_on(parts.before, inputs))
    index = jax.core.ShapedArray((), jnp.dtype("int32"))
    whole = [cut.program.values[c.value] for c in parts.loop.leaving]
    types = [jax.core.ShapedArray(v.shape, jnp.dtype(v.dtype)) for v in whole]
    middle = traced_on(parts.between, [*inputs, *types[:early]])
    reads = [*open_jaxpr(first).outvars, *open_jaxpr(middle).outvars]
    one = traced_on(parts.piece, [index, *(v.aval for v in reads)])
    last = traced_on(parts.after, [*inputs, *types])
    positions = {entry.value: i for i, entry in enumerate(cut.program.inputs)}
    return Apart(
        cut=cut,
        before=first,
        piece=without_dead_code(one),
        after=without_dead_code(last),
        entering=parts.loop.entering,
        leaving=parts.loop.leaving,
        sources=(
            *_sources(open_jaxpr(first)),
            *(frozenset[int]() for _ in parts.coupled),
        ),
        data=frozenset(positions[v] for v in cut.inputs),
        between=without_dead_code(middle),
        early=early,
        coupled=parts.coupled,
        captured=jaxpr_consts(closed),
    )


@dataclass(frozen=True, eq=False)
class _Parts:
    """The programs, as functions to be traced."""

    found: FlowResult
    cut: MicrobatchCut

    @cached_property
    def loop(self) -> MicrobatchLoop:
        """All loops as one; ops of both run once."""
        loops, met = self.cut.loops, self._met
        return MicrobatchLoop(
            tuple(sorted({op for loop in loops for op in loop.ops})),
            tuple(
                dict.fromkeys(
                    c for loop in loops for c in loop.entering if c.value not in met
                )
            ),
            tuple(c for loop in loops for c in loop.leaving),
        )

    @cached_property
    def coupled(self) -> tuple[LoopCrossing, ...]:
        """Inputs of the last loop that depend on outputs of the one before."""
        return tuple(c for c in self.cut.loops[-1].entering if c.value in self._met)

    @property
    def early(self) -> int:
        """Number of outputs of the loops before the last one."""
        return sum(len(loop.leaving) for loop in self.cut.loops[:-1])

    @cached_property
    def _met(self) -> frozenset[int]:
        """Values available once all micro-batches have produced their early outputs."""
        left = {c.value for loop in self.cut.loops[:-1] for c in loop.leaving}
        ops = [self.cut.program.ops[i] for i in self._between]
        return frozenset(left.union(*(op.results for op in ops)))

    @property
    def _between(self) -> tuple[int, ...]:
        return tuple(op for ops in self.cut.outside[1:-1] for op in ops)

    @property
    def flat(self) -> FlatProgram:
        return self.found.flat

    @property
    def split(self) -> Split:
        return Split.of(self.cut.rows, self.cut.count)

    def before(self, *arrays: Any) -> list[Any]:
        env = dict(zip(self.flat.top.inputs, arrays, strict=True))
        self.flat.run(frozenset(self.cut.pre), env)
        return [self._enters(env, crossing) for crossing in self.loop.entering]

    def between(self, *arrays: Any) -> list[Any]:
        env = self._known(arrays)
        return [self._enters(env, crossing) for crossing in self.coupled]

    def piece(self, index: Any, *arrays: Any) -> list[Any]:
        env: dict[int, Any] = {}
        views: dict[tuple[int, AxisSpan], Any] = {}
        enters = (*self.loop.entering, *self.coupled)
        for c, x in zip(enters, arrays, strict=True):
            if c.how == "whole":
                env[c.value] = x
            else:
                views[c.value, c.span] = x, None
        piece = Piece(self.split, index)
        inside = PieceEmitter(
            self.found, piece, lambda v: self.flat.read(v, env), views
        )
        return inside.top(self.loop)

    def after(self, *arrays: Any) -> list[Any]:
        env = self._known(arrays)
        self.flat.run(frozenset(self.cut.post), env)
        return [self.flat.read(v, env) for v in self.flat.top.outputs]

    def _known(self, arrays: Sequence[Any]) -> dict[int, Any]:
        """Return all values that are available before the last loop.

        Args:
          arrays: the step's inputs, then outputs of all micro-batches.
        """
        inputs = self.flat.top.inputs
        env = dict(zip(inputs, arrays, strict=False))
        left = arrays[len(inputs) :]
        self.flat.run(frozenset(self.cut.pre), env)
        env.update(zip((c.value for c in self.loop.leaving), left, strict=False))
        self.flat.run(frozenset(self._between), env)
        return env

    def _enters(self, env: dict[int, Any], crossing: LoopCrossing) -> Any:
        x = self.flat.read(crossing.value, env)
        if crossing.how == "whole":
            return x
        return view(x, crossing.span, self.split)[0]


def _sources(jaxpr: Any) -> tuple[frozenset[int], ...]:
    """Return for every result the positions of the inputs that it depends on."""
    of: dict[Any, frozenset[int]] = {
        v: frozenset({i}) for i, v in enumerate(jaxpr.invars)
    }
    none: frozenset[int] = frozenset()
    for eqn in jaxpr.eqns:
        read = [of.get(v, none) for v in eqn.invars if not is_literal(v)]
        of.update(dict.fromkeys(eqn.outvars, none.union(*read)))
    return tuple(none if is_literal(v) else of.get(v, none) for v in jaxpr.outvars)
