"""A micro-batched step as two programs: the body of its loop, and what runs once.

Where the rows of the batch meet once (contrastive logits, a balancing loss), a step has
two loops. The second recomputes what the first did, and then what needs values of all
rows: as one body it runs once, and waits midway for what couples the micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass
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
from rhino_jax.ir.program import Program
from rhino_jax.passes.microbatch.cut import (
    LoopCrossing,
    MicrobatchChoice,
    MicrobatchCut,
    MicrobatchLoop,
)
from rhino_jax.passes.microbatch.cutting import find_cut
from rhino_jax.passes.microbatch.emit import (
    Piece,
    PieceEmitter,
    Split,
    combined,
    start,
    sum_dtype,
    together,
    view,
)
from rhino_jax.passes.microbatch.flow.analysis import FlowResult
from rhino_jax.rewrite.retraced import traced_on


MAX_LOOPS = 2
"""Largest number of loops: one up to what couples the batch, one that depends on it."""


@dataclass(frozen=True, slots=True, eq=False)
class Apart:
    """A step whose batch runs in equal micro-batches, as separate programs.

    Attributes:
      cut: which ops run in and outside of the loop.
      once: closed jaxpr; the step's inputs, accumulated outputs of all micro-batches →
        inputs of a micro-batch (`entering`, `coupled`), then results of the step. Of
        inputs, whole values are as they are, data [.., rows of a micro-batch,
        micro-batches, ..].
      piece: closed jaxpr of a micro-batch; its number, `entering`, `coupled` → its
        outputs.
      entering, leaving: values that cross the loop's border.
      sources: for every value that enters, positions of the step's inputs that it
        depends on; empty for what is coupled.
      data: positions of the inputs that hold the batch.
      early: how many of the outputs, the first ones, `coupled` depends on; 0 where
        micro-batches are not coupled.
      coupled: inputs of a micro-batch, after all of `entering`, that depend on outputs
        of all micro-batches.
      captured: constants that the step captured, its last inputs.
      at: for every equation of `piece` the chunk in which it runs, None where that is
        not known; empty where it follows from what equations read.
    """

    cut: MicrobatchCut
    once: Any
    piece: Any
    entering: tuple[LoopCrossing, ...]
    leaving: tuple[LoopCrossing, ...]
    sources: tuple[frozenset[int], ...]
    data: frozenset[int]
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
    """Divide a step into programs in and outside of its loop over micro-batches.

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
    flat, loops, split = found.flat, cut.loops, Split.of(cut.rows, cut.count)
    inputs = flat.top.inputs
    pre, post = frozenset(cut.pre), frozenset(cut.outside[-1])
    middle = frozenset(op for ops in cut.outside[1:-1] for op in ops)
    leaving = tuple(c for loop in loops for c in loop.leaving)
    early = len(leaving) - len(loops[-1].leaving)
    # Values available once all micro-batches have produced their early outputs.
    met = {c.value for c in leaving[:early]}
    met.update(v for op in middle for v in cut.program.ops[op].results)
    every = dict.fromkeys(c for loop in loops for c in loop.entering)
    entering = tuple(c for c in every if c.value not in met)
    coupled = tuple(c for c in loops[-1].entering if c.value in met)
    # All loops as one; ops of both run once.
    ops = tuple(sorted({op for loop in loops for op in loop.ops}))
    body = MicrobatchLoop(ops, entering, leaving)

    def once(*arrays: Any) -> list[Any]:
        env = dict(zip(inputs, arrays, strict=False))
        flat.run(pre, env)
        left = arrays[len(inputs) :]
        env.update(zip((c.value for c in leaving), left, strict=True))
        flat.run(middle, env)
        read = [(c, flat.read(c.value, env)) for c in (*entering, *coupled)]
        flat.run(post, env)
        return [
            *(x if c.how == "whole" else view(x, c.span, split)[0] for c, x in read),
            *(flat.read(v, env) for v in flat.top.outputs),
        ]

    def piece(index: Any, *arrays: Any) -> list[Any]:
        pairs = [*zip((*entering, *coupled), arrays, strict=True)]
        env = {c.value: x for c, x in pairs if c.how == "whole"}
        views = {(c.value, c.span): (x, None) for c, x in pairs if c.how != "whole"}
        at = Piece(split, index)
        return PieceEmitter(found, at, lambda v: flat.read(v, env), views).top(body)

    given = [v.aval for v in consts_as_inputs(open_jaxpr(closed)).invars]
    whole = [cut.program.values[c.value] for c in leaving]
    types = [jax.core.ShapedArray(v.shape, jnp.dtype(v.dtype)) for v in whole]
    outside = without_dead_code(traced_on(once, [*given, *types]))
    number = jax.core.ShapedArray((), jnp.dtype("int32"))
    reads = open_jaxpr(outside).outvars[: len(entering) + len(coupled)]
    one = traced_on(piece, [number, *(v.aval for v in reads)])
    sources = _sources(open_jaxpr(outside))[: len(entering)]
    positions = {entry.value: i for i, entry in enumerate(cut.program.inputs)}
    return Apart(
        cut=cut,
        once=outside,
        piece=without_dead_code(one),
        entering=entering,
        leaving=leaving,
        sources=(*sources, *(frozenset[int]() for _ in coupled)),
        data=frozenset(positions[v] for v in cut.inputs),
        early=early,
        coupled=coupled,
        captured=jaxpr_consts(closed),
    )


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
